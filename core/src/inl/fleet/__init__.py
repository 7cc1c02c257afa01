"""Many engines behind one address: routing, continuing after failures, elasticity."""
