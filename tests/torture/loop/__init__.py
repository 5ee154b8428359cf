"""Random training loops with something planted in them, followed and compared with plain replays."""
