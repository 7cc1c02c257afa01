"""Functions on your own arrays: torch, JAX or NumPy in, the same kind out."""

from inl.functional.dynamics import get_backend as get_backend
from inl.functional.dynamics import inl_dynamics as inl_dynamics
from inl.functional.dynamics import inl_dynamics_n_steps as inl_dynamics_n_steps
from inl.functional.dynamics import inl_dynamics_step as inl_dynamics_step
from inl.functional.dynamics import set_backend as set_backend
