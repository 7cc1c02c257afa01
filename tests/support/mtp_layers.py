"""Random layers that predict further tokens, of tiny Llamas, in plain float64.

:class:`PlainMtp` uses none of the ops and models under test.
"""

from __future__ import annotations

import numpy as np

from eagle_heads import _attended, _fed_forward, _norm

LAYOUTS = {
    "qwen": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden",
             "mtp.fc", "mtp.norm"),
    "mimo": ("model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm",
             "model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.input_proj",
             "model.mtp_layers.0.final_layernorm"),
}  # fmt: skip
"""Names of layer, norms of embeddings and hidden states, projection and last norm."""


def mtp_tensors(rng, target, layout="qwen"):
    """Tensors of a layer beside those of a tiny Llama ``target``, in a layout."""
    config, tensors = target
    hidden = config["hidden_size"]
    layer, embed_norm, hidden_norm, join, norm = LAYOUTS[layout]

    def like(x):
        if x.ndim == 1:
            return (1 + 0.3 * rng.standard_normal(x.shape)).astype("f4")
        return (1.4 * rng.standard_normal(x.shape) / x.shape[1] ** 0.5).astype("f4")

    found = {
        layer + name.removeprefix("model.layers.0."): like(x)
        for name, x in tensors.items()
        if name.startswith("model.layers.0.")
    }
    for name in (embed_norm, hidden_norm, norm):
        found[f"{name}.weight"] = like(np.empty(hidden))
    found[f"{join}.weight"] = like(np.empty((hidden, 2 * hidden)))
    return found


class PlainMtp:
    """A layer and its target in float64, without caches.

    tensors: of both. shift: positions by which hidden states are displaced, a fault.
    """

    def __init__(self, config, tensors, layout="qwen", *, shift=0):
        self._w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self._layers, self._layout = config["num_hidden_layers"], layout
        self._shift = shift

    def _layer(self, x, at):
        w = self._w
        x = x + _attended(_norm(x, w[f"{at}input_layernorm.weight"]), w, at)
        normed = _norm(x, w[f"{at}post_attention_layernorm.weight"])
        return x + _fed_forward(normed, w, at)

    def hidden(self, ids):
        """The target's last normalized hidden states, [len(ids), H]."""
        x = self._w["model.embed_tokens.weight"][list(ids)]
        for index in range(self._layers):
            x = self._layer(x, f"model.layers.{index}.")
        return np.roll(_norm(x, self._w["model.norm.weight"]), self._shift, axis=0)

    def outputs(self, ids, count, draft=None):
        """Output vectors of ``count`` predictions after ``ids``, [count, H].

        draft: the tokens that are fed back, by default the predictions themselves.
        """
        w = self._w
        layer, embed_norm, hidden_norm, join, norm = LAYOUTS[self._layout]
        given, tokens, found = self.hidden(ids)[: len(ids) - 1], list(ids[1:]), []
        for step in range(count):
            table = w["model.embed_tokens.weight"][tokens]
            parts = [
                _norm(table, w[f"{embed_norm}.weight"]),
                _norm(given, w[f"{hidden_norm}.weight"]),
            ]
            if self._layout == "mimo":
                parts.reverse()
            x = np.concatenate(parts, -1) @ w[f"{join}.weight"].T
            out = _norm(self._layer(x, layer)[-1:], w[f"{norm}.weight"])
            found.append(out[0])
            given = np.concatenate([given, out])
            tokens.append(draft[step] if draft is not None else self.token(out[0]))
        return np.array(found)

    def token(self, out):
        """The predicted token of an output vector."""
        return int(np.argmax(out @ self._w["lm_head.weight"].T))

    def drafts(self, ids, count):
        """The tokens that the layer predicts after ``ids``."""
        return [self.token(out) for out in self.outputs(ids, count)]
