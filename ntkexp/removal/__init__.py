"""Examples are left out: training again without them, and how what that changed splits over them."""
