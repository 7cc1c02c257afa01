"""The cluster of these tests."""

from ray_hosts import hosts as hosts
from ray_hosts import ray_environment as ray_environment
