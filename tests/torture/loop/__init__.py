"""Random training loops with planted changes, followed and compared with plain replays."""
