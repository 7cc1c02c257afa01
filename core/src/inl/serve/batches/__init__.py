"""Files of requests that the server answers in the background."""
