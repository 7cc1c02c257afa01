"""The cluster of these tests."""

from ray_hosts import hosts as hosts
