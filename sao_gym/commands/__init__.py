"""Commands: what people type. They compose the rest, and nothing imports them."""
