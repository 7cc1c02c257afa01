"""Plain NumPy implementation of complexity-deep, token by token in float64.

Independent of the package's ops, models and kernels, which are compared with it.
"""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def rotate(x, position, theta):
    half = x.shape[-1] // 2
    rotation = np.exp(1j * position * theta ** (-np.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * rotation
    return np.concatenate([z.real, z.imag], -1)


class PlainDeep:
    """One sequence of a model of version 0.13.

    prompt: length of the prompt. carry: whether generated tokens start with the
    velocity of the previous token. highway: weight of the summed ``mu``.
    """

    def __init__(self, config, tensors, *, prompt=None, carry=False, highway=0.1):
        self.c, self.prompt, self.carry, self.highway = config, prompt, carry, highway
        self.w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.layers = config["num_hidden_layers"]
        self.keys = [[] for _ in range(self.layers)]
        self.values = [[] for _ in range(self.layers)]
        self.position = 0
        self.last_velocity = np.zeros(config["hidden_size"])

    def feed(self, token):
        """Append a token and return the logits [vocab]."""
        c, w = self.c, self.w
        generated = self.carry and self.position >= self.prompt
        h = w["model.embed_tokens.weight"][token]
        velocity = self.last_velocity if generated else np.zeros_like(h)
        mu, total = None, np.zeros_like(h)
        for index in range(self.layers):
            at = f"model.layers.{index}."
            x = norm(h, w[f"{at}input_layernorm.weight"], c["rms_norm_eps"])
            out = self.attend(index, f"{at}self_attn.", x, mu)
            out, velocity, layer_mu = self.dynamics(f"{at}dynamics.", out, velocity)
            h = h + out
            x = norm(h, w[f"{at}post_attention_layernorm.weight"], c["rms_norm_eps"])
            h = h + self.mlp(f"{at}mlp.", x, token, layer_mu)
            total = total + layer_mu
            mu = layer_mu + self.highway * total
        self.last_velocity = velocity
        self.position += 1
        h = norm(h, w["model.norm.weight"], c["rms_norm_eps"])
        table = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
        return w[f"{table}.weight"] @ h

    def attend(self, index, at, x, mu):
        c, w = self.c, self.w
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        parts = []
        for name in "qkv":
            part = w[f"{at}{name}_proj.weight"] @ x
            if mu is not None and f"{at}mu_to_{name}.weight" in w:
                part = part + w[f"{at}mu_to_{name}.weight"] @ mu
            parts.append(part.reshape(-1, c["hidden_size"] // heads))
        q, k, v = parts
        if c["use_qk_norm"]:
            q = np.array([norm(each, w[f"{at}q_norm.weight"], 1e-6) for each in q])
            k = np.array([norm(each, w[f"{at}k_norm.weight"], 1e-6) for each in k])
        theta = c["rope_theta"]
        self.keys[index].append(rotate(k, self.position, theta))
        self.values[index].append(v)
        q = rotate(q, self.position, theta)
        stop = self.position + 1
        visible = range(max(0, stop - (c.get("sliding_window") or stop)), stop)
        outs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = np.array([q[head] @ self.keys[index][j][kv] for j in visible])
            weights = np.exp((scores - scores.max()) / q.shape[-1] ** 0.5)
            values = np.array([self.values[index][j][kv] for j in visible])
            outs.append(weights @ values / weights.sum())
        return w[f"{at}o_proj.weight"] @ np.concatenate(outs)

    def dynamics(self, at, h, v):
        w, size = self.w, len(h)
        inner = w[f"{at}controller_in.weight"] @ np.concatenate([h, v])
        inner = inner + w[f"{at}controller_in.bias"]
        inner = inner * sigmoid(inner)
        out = w[f"{at}controller_out.weight"] @ inner
        out = out + w[f"{at}controller_out.bias"]
        alpha, gate = sigmoid(out[:size]), sigmoid(out[2 * size :])
        beta = np.minimum(np.log(1 + np.exp(out[size : 2 * size])), 2)
        mu = w[f"{at}mu"]
        if f"{at}mu_proj.weight" in w:
            mu = mu + w[f"{at}mu_proj.weight"] @ h
        v = np.clip(alpha * v - beta * (h - mu), -10, 10)
        return h + self.c["dynamics_dt"] * gate * v, v, mu

    def mlp(self, at, x, token, mu):
        w, count = self.w, self.c["num_experts"]
        table = w.get(f"{at}token_to_expert")
        scores = np.zeros(count)
        scores[token % count if table is None else int(table[token])] = 10
        if f"{at}mu_router.weight" in w:
            scores = scores + w[f"{at}mu_router.weight"] @ mu
        expert = int(np.argmax(scores))
        both = x @ w[f"{at}gate_up_proj"][expert]
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        return (gate * sigmoid(gate) * up) @ w[f"{at}down_proj"][expert]
