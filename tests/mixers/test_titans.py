"""Whole layers of Titans and Hope, token by token in float64, from their saved tensors alone."""

import copy

import pytest
import torch
import torch.nn.functional as F

from lmgeom.mixers import MIXERS

DIM, HEADS, TOKENS, SIZE = 12, 2, 17, 6
THETA = 1e4 ** (-2 * torch.arange(SIZE // 2, dtype=torch.float64) / SIZE)


def norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def turn(x, position):
    """Turn one head's vector by the angles of a position."""
    z = torch.complex(*x.chunk(2)) * torch.exp(1j * THETA * position)
    return torch.cat((z.real, z.imag))


def network(weights, u):
    for weight in weights[:-1]:
        u = F.silu(weight @ u)
    return weights[-1] @ u


class SlowMemory:
    """A `NeuralMemory` of one text: one token at a time, gradients by automatic differentiation."""

    def __init__(self, w, depth, chunk, momentum):
        self.w, self.depth, self.t = w, depth, 0
        # of a linear memory the chunk is no part of the definition
        self.chunk = chunk if depth > 1 else 1
        step = (1 - momentum) ** 2 / (1 + momentum) / 2 / self.chunk
        self.ceilings = torch.tensor([[step], [momentum], [1.0]], dtype=torch.float64)
        self.recent = torch.zeros(4, 3 * DIM, dtype=torch.float64)
        starts = [w[f"start.{layer}"] for layer in range(depth)]
        self.weights = [[z[head] for z in starts] for head in range(HEADS)]
        self.pushes = [[torch.zeros_like(z) for z in head] for head in self.weights]

    def step(self, x):
        w = self.w
        self.recent = torch.cat([self.recent[1:], (w["qkv.weight"] @ x)[None]])
        q, k, v = F.silu((self.recent * w["taps"].T).sum(0)).view(3, HEADS, SIZE)
        logits = (w["gates.weight"] @ x + w["gate_bias"]).view(3, HEADS)
        theta, eta, alpha = torch.sigmoid(logits) * self.ceilings
        if self.t % self.chunk == 0:
            self.anchors = [[z.detach().requires_grad_() for z in head] for head in self.weights]
        self.t += 1
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        tokens = zip(range(HEADS), q, k, v, theta, eta, alpha, strict=True)
        return torch.cat([self.head(*token) for token in tokens])

    def head(self, h, q, k, v, theta, eta, alpha):
        loss = (network(self.anchors[h], k) - v).square().sum()
        gradients = torch.autograd.grad(loss, self.anchors[h])
        steep = sum(g.square().sum() for g in gradients) / (4 * loss.detach())
        theta = theta / max(1.0, steep.item()) if self.depth > 1 else theta
        pairs = zip(self.pushes[h], gradients, strict=True)
        self.pushes[h] = [eta * s - theta * g for s, g in pairs]
        pairs = zip(self.weights[h], self.pushes[h], strict=True)
        self.weights[h] = [(1 - alpha) * z + s for z, s in pairs]
        return norm(network(self.weights[h], q), self.w["norm.weight"][h])


def look_up(w, query, keys, values, head):
    """One head's answer to one query, persistent pairs first."""
    own = w.get("persistent", torch.empty(2, HEADS, 0, SIZE))
    keys, values = torch.stack([*own[0, head], *keys]), torch.stack([*own[1, head], *values])
    return (keys @ query / SIZE**0.5).softmax(0) @ values


def project(w, x, position):
    """Queries, keys and values (H, d) of one token."""
    q, k, v = (w["qkv.weight"] @ x).view(3, HEADS, SIZE)
    if "qk_norm.weight" in w:
        q, k = norm(q, w["qk_norm.weight"][0]), norm(k, w["qk_norm.weight"][1])
    return [turn(z, position) for z in q], [turn(z, position) for z in k], list(v)


def windowed(w, x, window):
    """Attention of one text over a window."""
    parts = [project(w, token, t) for t, token in enumerate(x)]
    rows = []
    for t in range(len(x)):
        past = parts[0 if window is None else max(0, t + 1 - window) : t + 1]
        heads = [
            look_up(w, parts[t][0][h], [p[1][h] for p in past], [p[2][h] for p in past], h)
            for h in range(HEADS)
        ]
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def segments(w, memory, x, chunk):
    """MAC: attention inside segments with what the memory recalls, the memory learning from it."""
    near, far = [], []
    for t, token in enumerate(x):
        if t % chunk == 0:
            fixed, parts = list(memory.weights), []
        q = F.silu(w["query.weight"] @ token).view(HEADS, SIZE)
        recalled = [network(fixed[h], q[h] / q[h].norm()) for h in range(HEADS)]
        gains = memory.w["norm.weight"]
        recalled = torch.cat([norm(z, g) for z, g in zip(recalled, gains, strict=True)])
        parts.append((project(w, recalled, t % chunk), project(w, token, t % chunk)))
        both = [pair for side in (0, 1) for pair in (p[side] for p in parts)]
        query = parts[-1][1][0]
        heads = [
            look_up(w, query[h], [p[1][h] for p in both], [p[2][h] for p in both], h)
            for h in range(HEADS)
        ]
        near.append(torch.cat(heads))
        far.append(memory.step(near[-1]).detach())
    return torch.stack(near), torch.stack(far)


def slow(name, layer, x, depth, chunk, momentum=0.5):
    """Any wiring for one text x (T, D)."""
    w = layer.state_dict()
    own = {key.removeprefix("memory."): z for key, z in w.items() if key.startswith("memory.")}
    memory = SlowMemory(own, depth, chunk, momentum)
    if name == "titans-mac":
        near, far = segments(w, memory, x, chunk)
    else:
        far = torch.stack([memory.step(token) for token in x]).detach()
    if name == "titans-lmm":
        return (far * F.silu(x @ w["gate.weight"].T)) @ w["output.weight"].T
    if name == "titans-mal":
        return windowed(w, norm(x + far, w["norm.weight"]), layer.window) @ w["output.weight"].T
    if name == "titans-mag":
        near = windowed(w, x, layer.window)
    return (norm(near, w["norm.weight"]) * F.silu(far)) @ w["output.weight"].T


def slow_hope(layer, x, chunk):
    """Hope for one text x (T, D), by its five memories and the written-out rule."""
    w, eye = layer.state_dict(), torch.eye(SIZE, dtype=torch.float64)
    recent = torch.zeros(4, 2 * DIM, dtype=torch.float64)
    maps = [[w["maps"][i, h] for i in range(3)] + list(w["rows"][h]) for h in range(HEADS)]
    ceiling, outputs = min(1 / 3, 1 - 2 ** (-1 / chunk)), []
    for t, token in enumerate(x):
        recent = torch.cat([recent[1:], (w["uq.weight"] @ token)[None]])
        u, q = F.silu((recent * w["taps"].T).sum(0)).view(2, HEADS, SIZE)
        if t % chunk == 0:
            fixed = [list(head) for head in maps]
        heads = []
        for h in range(HEADS):
            read = [z + eye for z in fixed[h][:3]] + fixed[h][3:]
            k, v = (F.normalize(z @ u[h], dim=0) for z in read[:2])
            logit = [z @ u[h] + b for z, b in zip(read[3:], w["row_bias"][:, h], strict=True)]
            eta, alpha = ceiling * torch.sigmoid(logit[0]), torch.sigmoid(logit[1])
            query = q[h] / q[h].norm()
            heads.append(norm(query + maps[h][2] @ query, w["norm.weight"][h]))
            decay = alpha * eye - eta * torch.outer(k, k)
            pairs = zip(maps[h], read, strict=True)
            maps[h] = [z @ decay - eta * (m @ (k - v))[..., None] * k for z, m in pairs]
        outputs.append(torch.cat(heads))
    return (torch.stack(outputs) * F.silu(x @ w["gate.weight"].T)) @ w["output.weight"].T


def lively(name, **options):
    torch.manual_seed(0)
    layer = MIXERS[name](DIM, HEADS, context=TOKENS, **options).double().requires_grad_(False)
    for weight in layer.parameters():
        weight.add_(0.3 * torch.randn_like(weight))
    return layer, torch.randn(TOKENS, DIM, dtype=torch.float64)


def agree(layer, x, exact):
    """The layer in parallel, one token at a time, and in float32 gives the exact outputs."""
    state, parts = layer.initial_state(1), []
    for token in x:
        y, state = layer.step(token[None, None], state)
        parts.append(y[0, 0])
    assert (layer(x[None])[0] - exact).abs().max() < 1e-10
    assert (torch.stack(parts) - exact).abs().max() < 1e-10
    single = copy.deepcopy(layer).float()(x[None].float())[0]
    assert (single - exact).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["titans-lmm", "titans-mag", "titans-mal", "titans-mac"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_titans_match_the_token_loop(name, depth, chunk):
    window = {"window": 4} if name in ("titans-mag", "titans-mal") else {}
    layer, x = lively(name, depth=depth, chunk=chunk, **window)
    agree(layer, x, slow(name, layer, x, depth, chunk))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("titans-lmm", {}),
        ("titans-mag", {"qk_norm": True, "persistent": 0, "window": 4}),
        ("titans-mal", {"qk_norm": True, "persistent": 1, "window": None}),
        ("titans-mac", {"qk_norm": True, "persistent": 0}),
    ],
)
def test_titans_with_options_match_the_token_loop(name, options, depth, momentum):
    layer, x = lively(name, depth=depth, chunk=5, momentum=momentum, **options)
    agree(layer, x, slow(name, layer, x, depth, 5, momentum))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_hope_matches_the_token_loop(chunk):
    layer, x = lively("hope", chunk=chunk)
    agree(layer, x, slow_hope(layer, x, chunk))
