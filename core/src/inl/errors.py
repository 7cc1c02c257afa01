"""Errors a caller may want to catch.

InlError
├── DeviceError     BackendNotFound · BackendUnavailable · OutOfMemory
├── PluginError
├── KernelError     NoKernel · KernelFailed
├── ModelError      CheckpointError · UnknownArchitecture · WeightMismatch ·
│                   TemplateError
├── RequestError    PromptTooLong · Cancelled
├── RunnerError     ProtocolError · WorkerLost
└── MissingPackage

A message is lower-case and says what failed, where (file, tensor, field, plugin),
what was found, and what is accepted or what to do.
"""

from __future__ import annotations


class InlError(Exception):
    """Root of every error that this project raises on purpose."""


class DeviceError(InlError):
    """A device that was named wrongly, is not there, or is full."""


class BackendNotFound(DeviceError):
    """No installed package serves this device type."""


class BackendUnavailable(DeviceError):
    """A package serves this device type, but the device cannot be used; says why."""


class OutOfMemory(DeviceError):
    """An allocation did not fit; says how much was asked for and what would fit."""


class PluginError(InlError):
    """A plugin broke its side of the contract."""


class KernelError(InlError):
    """An op cannot be computed, or its kernel failed."""


class NoKernel(KernelError):
    """Every kernel refused; the message lists each refusal."""


class KernelFailed(KernelError):
    """A kernel raised or gave a result that its op does not allow."""


class ModelError(InlError):
    """A model cannot be loaded."""


class CheckpointError(ModelError):
    """A model file is damaged, lies about itself, or holds an unsupported kind."""


class UnknownArchitecture(ModelError):
    """No registered model answers to the checkpoint's architecture."""


class WeightMismatch(ModelError):
    """Tensors are missing, unused, or of the wrong shape; names each."""


class TemplateError(ModelError):
    """A chat template is malformed, or does what a template may not."""


class RequestError(InlError, ValueError):
    """A request that cannot be served as it stands."""


class PromptTooLong(RequestError):
    """The prompt does not fit into the context."""


class Cancelled(RequestError):
    """The caller took the request back."""


class RunnerError(InlError):
    """The runner that computes steps cannot go on."""


class ProtocolError(RunnerError):
    """A frame that does not follow the message layout."""


class WorkerLost(RunnerError):
    """The worker process behind a runner is gone."""


class MissingPackage(InlError, ImportError):
    """An optional package is not installed; the message is the install line."""
