"""Images as arrays: bounded decoding, and what vision encoders take of them."""
