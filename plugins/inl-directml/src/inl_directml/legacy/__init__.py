"""What torch-directml, DirectML's discontinued route through torch 2.4.1, needs."""
