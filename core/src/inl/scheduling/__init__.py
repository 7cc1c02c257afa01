"""Which tokens run in the next step: requests, block tables and plans, integers only."""
