"""INL functions on torch, JAX and NumPy arrays; results are of the same framework."""

from inl_toolkit.functional.dynamics import get_backend as get_backend
from inl_toolkit.functional.dynamics import inl_dynamics as inl_dynamics
from inl_toolkit.functional.dynamics import inl_dynamics_n_steps as inl_dynamics_n_steps
from inl_toolkit.functional.dynamics import inl_dynamics_step as inl_dynamics_step
from inl_toolkit.functional.dynamics import set_backend as set_backend
