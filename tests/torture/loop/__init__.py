"""Random training loops with something planted in them, followed and held against plain replays."""
