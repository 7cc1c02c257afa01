"""Records what a runner received and returned, and replays it."""
