"""Exceptions that callers may want to catch.

InlError
├── DeviceError     BackendNotFound · BackendUnavailable · OutOfMemory
├── PluginError
├── KernelError     NoKernel · KernelFailed
├── ModelError      CheckpointError (TokenizerNotFound) · UnknownArchitecture ·
│                   WeightMismatch · TemplateError
├── RequestError    PromptTooLong · QueueFull · InvalidJson
├── NonFiniteLogits
├── RunnerError     ProtocolError · WorkerLost
└── MissingPackage

Messages are lower-case and name what failed, where (file, tensor, field, plugin), what
was found, and what is accepted or what to do.
"""

from __future__ import annotations


class InlError(Exception):
    """Base class of all errors of this project."""


class DeviceError(InlError):
    """A device has a malformed name, is not available, or is out of memory."""


class BackendNotFound(DeviceError):
    """No installed package supports this device type."""


class BackendUnavailable(DeviceError):
    """The device type is supported, but the device cannot be used."""


class OutOfMemory(DeviceError):
    """An allocation failed; states the size requested and the size available."""


class PluginError(InlError):
    """A plugin violates its contract."""


class KernelError(InlError):
    """An op cannot be computed, or its kernel failed."""


class NoKernel(KernelError):
    """Every kernel refused the arguments; lists the reason of each."""

    op = ""
    """The op, if it is known."""


class KernelFailed(KernelError):
    """A kernel raised, or returned a result that its op does not allow."""


class ModelError(InlError):
    """A model cannot be loaded."""


class CheckpointError(ModelError):
    """A model file is damaged, inconsistent, or of an unsupported kind."""


class TokenizerNotFound(CheckpointError):
    """A model has no tokenizer; it still serves token ids."""


class UnknownArchitecture(ModelError):
    """No registered model implements the checkpoint's architecture."""


class WeightMismatch(ModelError):
    """Tensors are missing, unused, or of the wrong shape; lists each."""


class TemplateError(ModelError):
    """A chat template is malformed, or does something forbidden."""


class RequestError(InlError, ValueError):
    """A request has a value that is not accepted."""


class PromptTooLong(RequestError):
    """The prompt does not fit the context."""


class QueueFull(RequestError):
    """As many requests or tokens wait as the engine accepts; try again later."""


class InvalidJson(RequestError):
    """A text is no JSON, or exceeds a limit of :mod:`inl.bounded_json`."""


class NonFiniteLogits(InlError):
    """The model computed NaN or infinite logits for a request, which ends."""


class RunnerError(InlError):
    """A runner has failed and cannot continue."""


class ProtocolError(RunnerError):
    """A frame, message or call does not follow the protocol."""


class WorkerLost(RunnerError):
    """The worker process of a runner has exited or does not respond."""


class MissingPackage(InlError, ImportError):
    """An optional package is not installed; the message has the install command."""


NOTE = "in kernel "
"""Beginning of the note on an exception that a kernel raised; its label follows."""


def message(error: BaseException) -> str:
    """Return the message of an error, and the kernel that raised it."""
    notes = [n for n in getattr(error, "__notes__", ()) if n.startswith(NOTE)]
    return f"{error} ({', '.join(notes)})" if notes else str(error)
