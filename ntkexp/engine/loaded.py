"""What every run needs sooner or later, loaded before processes are forked, since each would load it anew."""
