"""Front-end processes: HTTP, JSON and text beside the process that steps the engine."""
