"""GraphBody and NodeHead: features of graphs and their nodes, and actions that name a node."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.bodies import Body
from lightning_rl.envs.networks.distributions import Categorical
from lightning_rl.envs.networks.layers import ACTIVATIONS, linear, output, require_activation
from lightning_rl.envs.networks.policy_heads import SMALL, PolicyHead
from lightning_rl.envs.networks.space import ActionKind, Discrete, Space
from lightning_rl.errors import ConfigError, require_at_least, require_finite


@configurable
class GraphBody(Body):
    """Passes messages along edges, then lets all nodes attend to each other.

    It reads K nodes, padded, of one graph, or of several of equal padded size one after the other.
    First come layers of a graph isomorphism network (Xu et al. 2019, GIN, eq. 4.1), as matrix
    products with the adjacency matrix, each normalised over the nodes that exist. Then marks of
    nodes, such as who pointed at them when, are added, and transformer layers over nodes follow
    (Vaswani et al. 2017), each initialised close to the identity. Renumbering a graph's nodes only
    permutes the nodes' features.

    Args:
        hidden: D, features per node.
        layers: layers of the graph network.
        attention: number of transformer layers.
        heads: attention heads of each.
        graphs: number of graphs that the nodes belong to.
        node_features: append the nodes' features to those of the whole, as :class:`NodeHead` reads
            them: D + K D features; False: D.
        activation: activation within layers.
        adjacency: name of the adjacency observation (K, K).
        nodes: name of the observation of nodes (K, ...).
        exists: name of the observation that is 1 for nodes and 0 for padding, (K,).
        marks: name of the observation of marks (K, ...); None: there are none.
        context: names of observations of the whole, such as the time.

    Raises:
        ConfigError: for values out of range, or observations of other shapes.
    """

    def __init__(
        self,
        hidden: int = 32,
        layers: int = 3,
        attention: int = 1,
        heads: int = 4,
        graphs: int = 1,
        node_features: bool = True,
        activation: str = "relu",
        adjacency: str = "adjacency",
        nodes: str = "nodes",
        exists: str = "exists",
        marks: str | None = None,
        context: list[str] | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, hidden=hidden, layers=layers, heads=heads, graphs=graphs)
        require_at_least(0, attention=attention)
        require_activation(activation)
        if hidden % heads:
            raise ConfigError(f"GraphBody(hidden={hidden}) must be a multiple of heads={heads}")
        self.hidden = hidden
        self.counts = (layers, attention)
        self.heads = heads
        self.graphs = graphs
        self.node_features = node_features
        self.activation = activation
        self.names = {"adjacency": adjacency, "nodes": nodes, "exists": exists}
        self.marks = marks
        self.context = context or []

    def build(self, space: Space) -> int:
        marks = [] if self.marks is None else [self.marks]
        found = space.observed([*self.names.values(), *self.context, *marks], "GraphBody")
        shapes = {role: found[name].shape for role, name in self.names.items()}
        count = shapes["exists"][0] if shapes["exists"] else 0
        shapes |= {} if self.marks is None else {self.marks: found[self.marks].shape}
        fits = shapes["adjacency"] == (count, count) and len(shapes["exists"]) == 1
        wrong = [n for n, shape in shapes.items() if len(shape) < 1 or shape[0] != count]
        if not fits or wrong or count % self.graphs:
            there = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            raise ConfigError(
                f"GraphBody reads adjacency (K, K), nodes (K, ...) and exists (K,), with K a "
                f"multiple of graphs={self.graphs}, but the environment shows {there}; name "
                "other observations"
            )
        width, (layers, attention) = self.hidden, self.counts
        self.count = count
        self.sizes = {name: observed.size for name, observed in found.items()}
        self.into = linear(self.sizes[self.names["nodes"]] // count, width)
        self.layers = nn.ModuleList(_GIN(width, self.activation) for _ in range(layers))
        marked = 0 if self.marks is None else self.sizes[self.marks] // count
        told = sum(self.sizes[name] for name in self.context)
        self.mark = linear(marked + told, width, SMALL) if marked + told else None
        self.attention = nn.ModuleList(
            _Attention(width, self.heads, self.activation) for _ in range(attention)
        )
        self.whole = nn.Sequential(linear(2 * width + told, width), ACTIVATIONS[self.activation]())
        return width * (1 + count) if self.node_features else width

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        adjacency = observations[self.names["adjacency"]]
        batch = adjacency.shape[:-2]
        rows = batch.numel()
        dtype = self.into.weight.dtype
        adjacency = adjacency.reshape(rows, self.count, self.count).to(dtype)
        exists = self._of_nodes(self.names["exists"], observations, rows)
        contexts = [observations[n].reshape(rows, self.sizes[n]).to(dtype) for n in self.context]
        features = self.into(self._of_nodes(self.names["nodes"], observations, rows)) * exists
        for layer in self.layers:
            features = layer(features, adjacency, exists)
        if self.mark is not None:
            parts = [value.unsqueeze(1).expand(-1, self.count, -1) for value in contexts]
            if self.marks is not None:
                parts.append(self._of_nodes(self.marks, observations, rows))
            features = (features + self.mark(torch.cat(parts, -1))) * exists
        for block in self.attention:
            features = block(features, exists)
        whole = self.whole(torch.cat([*self._pooled(features, exists), *contexts], -1))
        if self.node_features:
            whole = torch.cat([whole, features.flatten(1)], -1)
        return whole.reshape(*batch, whole.shape[-1])

    def _of_nodes(self, name: str, observations: Mapping[str, Tensor], rows: int) -> Tensor:
        """Return an observation of all nodes, (B, K, F)."""
        width = self.sizes[name] // self.count
        return observations[name].reshape(rows, self.count, width).to(self.into.weight.dtype)

    def _pooled(self, features: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Average each graph's features; return their mean and mean deviation from it, (B, D)."""
        split = (self.graphs, self.count // self.graphs)
        apart = features.unflatten(1, split)
        counts = exists.unflatten(1, split).sum(2).clamp(min=1)
        means = apart.sum(2) / counts
        mean = means.mean(1)
        return mean, (means - mean.unsqueeze(1)).abs().mean(1)


class _GIN(nn.Module):
    """h <- norm(MLP((1 + eps) h + sum of the neighbours' h))."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.layers = nn.Sequential(
            linear(width, width), ACTIVATIONS[activation](), linear(width, width)
        )

    def forward(self, features: Tensor, adjacency: Tensor, exists: Tensor) -> Tensor:
        summed = (1 + self.eps) * features + adjacency @ features
        return normalized(self.layers(summed), exists)


class _Attention(nn.Module):
    """A transformer layer over the nodes that exist; its branches are initialised close to zero."""

    def __init__(self, width: int, heads: int, activation: str) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into = linear(width, 3 * width, 1.0)
        self.out = linear(width, width, SMALL)
        self.layers = nn.Sequential(
            linear(width, 2 * width), ACTIVATIONS[activation](), linear(2 * width, width, SMALL)
        )

    def forward(self, features: Tensor, exists: Tensor) -> Tensor:
        rows = self.into(self.norms[0](features)).unflatten(-1, (3, self.heads, -1))
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        seen = exists.bool().reshape(len(exists), 1, 1, exists.shape[1])
        # A node alone sees itself where nothing exists: no row of the softmax may be empty.
        seen = seen | ~seen.any(-1, keepdim=True)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        features = features + self.out(mixed.transpose(1, 2).flatten(2)) * exists
        after: Tensor = features + self.layers(self.norms[1](features)) * exists
        return after


def normalized(features: Tensor, exists: Tensor) -> Tensor:
    """Normalise features (B, K, D) to mean 0 and variance 1 over the nodes that exist."""
    count = exists.sum(1, keepdim=True).clamp(min=1)
    mean = (features * exists).sum(1, keepdim=True) / count
    apart = (features - mean) * exists
    spread = (apart * apart).sum(1, keepdim=True) / count
    return apart * (spread + 1e-5).rsqrt()


@configurable
class NodeHead(PolicyHead):
    """Names a node: scores each from its features and the whole's, as :class:`GraphBody` gives
    them.

    With ``last`` it also scores nodes by similarity to one of them: ``alike`` times the similarity
    of their features, under a learned matrix that is initialised as a rotation, so that equal
    features are the most similar (a pointer network, Vinyals et al. 2015).

    Args:
        last: name of an observation (K,) that is 1 for the node in question and 0 for others; None:
            there is none.
        alike: initial weight of the similarity.
        choices: name of an observation (K,) that is 0 for nodes that must not be named, such as
            padding; None: all may be.

    Raises:
        ConfigError: if ``alike`` is not finite; when built, if the features are not a
            ``GraphBody``'s.
    """

    def __init__(
        self, last: str | None = None, alike: float = 4.0, choices: str | None = None
    ) -> None:
        super().__init__()
        require_finite(alike=alike)
        self.last = last
        self.begin = alike
        self.choices = choices

    def build(self, features: int, action: ActionKind) -> None:
        if not isinstance(action, Discrete):
            raise ConfigError(
                f"NodeHead names one of K nodes, but the action is {type(action).__name__}; use "
                "another head"
            )
        self.count = action.n
        if features % (action.n + 1):
            raise ConfigError(
                f"NodeHead gets {features} features for {action.n} nodes, but reads D of the whole "
                f"and D of each node, {action.n + 1} D; use GraphBody with node_features: true"
            )
        self.width = features // (action.n + 1)
        self.layers = nn.Sequential(
            linear(2 * self.width, self.width), nn.ReLU(), output(self.width, 1, SMALL)
        )
        self.one_hot = action.one_hot
        if self.last is not None:
            self.turn = linear(self.width, self.width, 1.0)
            self.alike = nn.Parameter(torch.tensor(float(self.begin)))

    def forward(self, features: Tensor, observations: Mapping[str, Tensor]) -> Categorical:
        whole = features[..., : self.width].unsqueeze(-2)
        nodes = features[..., self.width :].unflatten(-1, (self.count, self.width))
        known = torch.cat([nodes, whole.expand(nodes.shape)], -1)
        logits: Tensor = self.layers(known).squeeze(-1)
        if self.last is not None:
            turned = self.turn(nodes)
            asked = observations[self.last].unsqueeze(-1) * turned
            alike = _cosine(turned, asked.sum(-2, keepdim=True))
            logits = logits + self.alike * alike
        if self.choices is not None:
            logits = logits.masked_fill(observations[self.choices] == 0, -torch.inf)
        return Categorical(logits, self.one_hot)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine (*B,) of vectors (*B, D); 0 for zeros, where torch has no second
    derivative.
    """
    one, other = torch.broadcast_tensors(one, other)
    none = (one == 0).all(-1) | (other == 0).all(-1)
    one, other = (vectors.masked_fill(none.unsqueeze(-1), 1.0) for vectors in (one, other))
    return F.cosine_similarity(one, other, -1).masked_fill(none, 0.0)
