"""sao-gym: multi-turn agent environments as token streams, and an asynchronous SAO trainer that learns from them."""

__version__ = "0.1.0"
