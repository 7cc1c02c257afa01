"""Steps of one row of a small model as one persistent kernel."""
