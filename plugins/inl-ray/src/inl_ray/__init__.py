"""Workers of INL in a Ray cluster: the place ``ray:DEVICE``."""
