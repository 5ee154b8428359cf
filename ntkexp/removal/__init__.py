"""Training again without some examples, and splitting the change over them."""
