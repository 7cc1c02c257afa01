"""Workers on other hosts, started by ssh."""
