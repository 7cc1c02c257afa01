"""Search for the fastest correct kernel configuration of each op on a device."""
