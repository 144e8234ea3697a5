"""The model families whose forward pass the native engine has itself, a line each: what their parameters do not show.

No torch here: the rehearsal of a run asks which families there are. `native/runners/families.py` reads a model by these facts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

ConfigFact = Callable[[Any], float]
"""A number that a config of transformers holds."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Places of weights: modules within a layer, and the model's own norm. A norm that a model does not have is not there."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """A module each for queries, keys and values, or one that holds all of their rows."""
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """A module each for gate and up projection, or one that holds the rows of both."""
    down: str = "mlp.down_proj"
    before_attention: str = "input_layernorm"
    behind_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    behind_mlp: str = ""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    head_gate: str = "self_attn.g_proj"
    """A product with one output for each head, whose sigmoid is the factor of what the head gives."""
    sinks: str = "self_attn.sinks"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    experts_in: str = "gate_up_proj"
    """The stacked first matrix of experts, within them."""
    choice_bias: str = "mlp.expert_bias"
    """A buffer with what is added to the weights of experts where these are chosen, and not where they serve."""
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    """Parts of an expert that serves every token beside the chosen ones, if there is one."""
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    """A product with one output, whose sigmoid is the factor of that expert."""
    convolution: str = "conv.conv"
    """Part of a layer that convolves, where the next two are in the places of `qkv` and `out`."""
    into_convolution: str = "conv.in_proj"
    out_of_convolution: str = "conv.out_proj"
    into_recurrence: tuple[str, ...] = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    """Parts of a layer with a recurrence, in the place of `qkv` (`Recurrence.rows`)."""
    out_of_recurrence: str = "linear_attn.out_proj"
    recurrence_convolution: str = "linear_attn.conv1d"
    recurrence_norm: str = "linear_attn.norm"
    decay: str = "linear_attn.A_log"
    step_bias: str = "linear_attn.dt_bias"
    skip: str = ""
    """The part of a value that a state space gives beside what it reads."""
    per_layer_gate: str = "per_layer_input_gate"
    """Parts of a layer that has an embedding of its own (Gemma 3n): its gate, what it adds, and the norm of that."""
    per_layer_out: str = "per_layer_projection"
    behind_per_layer: str = "post_per_layer_input_norm"
    per_layer_embed: str = "model.embed_tokens_per_layer"
    """Embeddings of all layers' own; what is added to them of a token's embedding; and the norm of that for one layer."""
    per_layer_into: str = "model.per_layer_model_projection"
    per_layer_norm: str = "model.per_layer_projection_norm"
    scale_behind: str = "layer_scalar"
    """A buffer with the factor of the residual stream behind a layer."""
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    rotary: str = "rotary_emb"
    """The module of the inner model that knows the angles of positions."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A mixture of experts (Shazeer et al., arXiv:1701.06538): a softmax over all experts, of which the best serve; or a sigmoid of each."""

    experts: int
    chosen: int
    normalise: bool
    """Whether the chosen experts' weights are made to add up to one."""
    transposed: bool = False
    """Whether experts are stored as [in, out], with the outputs of gate and up alternating (GPT-OSS)."""
    sigmoid: bool = False
    """Whether each expert's weight is the sigmoid of its score, and experts are chosen by it plus a bias (`Names.choice_bias`). Only the C++ kernels do so."""
    scale: float = 1.0
    """The factor of sigmoids, after they were made to add up to one."""
    least: float = 1e-6
    """Added to the sum of sigmoids before they are divided by it."""


@dataclass(frozen=True)
class Clamp:
    """The gated activation (up + 1) * gate * sigmoid(alpha * gate), where the gate is at most `limit`, and up is within it on both sides of zero."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A matrix [key_width, value_width] for each head of values, which every token changes at its key, and reads with its query."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel: int
    """Tokens over which queries, keys and values are convolved before."""

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.value_heads * self.value_width

    @property
    def convolved(self) -> int:
        """Numbers of all queries, keys and values of a token."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Numbers that a layer keeps of a sequence: inputs of the convolution, and the matrices."""
        return (self.kernel - 1) * self.convolved + self.key_width * self.values

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each part of the first product."""
        raise NotImplementedError

    @property
    def normed(self) -> int:
        """Weights of the norm of what is read; 0: there is none."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Recurrence):
    """A gated delta rule (arXiv:2412.06464): a value replaces what the matrix says of its key."""

    by_key_head: bool = False
    """Whether the rows of its products lie by heads of keys (Qwen3-Next): queries, keys, values and gates of one head, then those of the next; and so for
    what is taken, and steps."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Parts of queries, keys and values; of gates; of what each head takes of a correction; of its steps. Or of the first two, and of the last two."""
        parts = self.convolved, self.values, self.value_heads, self.value_heads
        return (sum(parts[:2]), sum(parts[2:])) if self.by_key_head else parts

    @property
    def normed(self) -> int:
        return self.value_width


@dataclass(frozen=True, kw_only=True)
class StateSpace(Recurrence):
    """A selective state space (Mamba 2, arXiv:2405.21060): a value times its step of time is added at its key, after the matrix has faded for as long. Keys
    are what is called B there, queries C, values x; heads of keys are its groups, over each of which it is normed after its gate."""

    steps: tuple[float, float] = (0.0, math.inf)
    """Bounds of a step."""
    gate_last: bool = False
    """Whether it is normed before its gate."""
    plain: bool = False
    """Whether it has no norm."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of gates, values, keys, queries and steps."""
        return self.values, self.values, self.keys, self.keys, self.value_heads

    @property
    def rows(self) -> tuple[int, ...]:
        """The gates, values, keys, queries and steps, which are one part."""
        return (sum(self.parts),)

    @property
    def normed(self) -> int:
        return 0 if self.plain else self.values


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / length)), as those of Llama 4 are."""

    beta: float
    length: int


@dataclass(frozen=True)
class Factors:
    """Factors of a product, which are no part of its weights."""

    into: float = 1.0
    """The factor of its inputs."""
    rows: tuple[float, ...] = (1.0,)
    """Factors of the outputs of each of its parts, biases included."""


def _one(of: Any) -> float:
    return 1.0


def _none(of: Any) -> float:
    return 0.0


def _always(of: Any, layer: int) -> bool:
    return True


def _never(of: Any, layer: int) -> bool:
    return False


def _nothing(of: Any) -> str:
    return ""


def _no_clamp(of: Any) -> Clamp | None:
    return None


def _no_growth(of: Any) -> QueryGrowth | None:
    return None


def _no_experts(of: Any) -> Routing | None:
    return None


def _no_factors(of: Any) -> Mapping[str, Factors]:
    return {}


def _no_recurrence(of: Any, layer: int) -> Recurrence | None:
    return None


@dataclass(frozen=True, kw_only=True)
class OwnFamily:
    names: Names = Names()
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    centred: bool = False
    """Whether the norms before parts of a layer, and the model's own, take the mean off first (LayerNorm)."""
    parallel: bool = False
    """Whether the feed-forward part reads what attention reads, and both are added together."""
    neighbours: bool = False
    """Whether rotary positions turn neighbouring numbers of a head, and not those of its two halves."""
    angles: Literal["twice", "in pairs", "once"] = "twice"
    """How the model's rotary module lists the angles of a position: all, and all once more; each twice; or each once."""
    turned: Callable[[Any, int], bool] = _always
    """Whether a layer has rotary positions."""
    embed_scale: ConfigFact = _one
    residual_scale: ConfigFact = _one
    """The factor of what attention and feed-forward part add to the residual stream."""
    logit_scale: ConfigFact = _one
    logit_cap: ConfigFact = _none
    """Bound of the logits x, which become cap * tanh(x / cap); 0: none."""
    routing: Callable[[Any], Routing | None] = _no_experts
    grows: Callable[[Any], QueryGrowth | None] = _no_growth
    clamp: Callable[[Any], Clamp | None] = _no_clamp
    ungated: bool = False
    """Whether a feed-forward part has no gate beside up. Only the C++ kernels have such parts."""
    activation: str = ""
    """Activation of the feed-forward part, where a config does not name it."""
    attention: Callable[[Any, int], bool] = _always
    """Whether a layer without convolution and recurrence attends. One that does not is a feed-forward part alone."""
    convolves: Callable[[Any, int], bool] = _never
    """Whether a layer has a gated short convolution (LFM2) in the place of attention. Only the C++ kernels have it."""
    recurrence: Callable[[Any, int], Recurrence | None] = _no_recurrence
    """The recurrence that a layer has in the place of attention. Only the C++ kernels have it."""
    beside: bool = False
    """Whether layers with a recurrence attend too, and what both give is added."""
    factors: Callable[[Any], Mapping[str, Factors]] = _no_factors
    """Factors of products (`weight_places.products`). Only the C++ kernels have them."""
    gated: bool = False
    """Whether what attention gives is multiplied by the sigmoids of gates, which follow each head's queries in the rows of their product. Only the C++
    kernels do so."""
    values_normed: bool = False
    """Whether values are normed, each head by itself and without weights. Only the C++ kernels do so."""
    placeholders: tuple[str, ...] = ()
    """Names in the outer config of tokens whose embedding is that of padding where nothing stands in their place."""
    lacks: Callable[[Any], str] = _nothing
    """Empty, or what a config asks for and no decoder of ours has, a whole clause."""
    sure: bool = True
    """Whether a decoder of ours serves all models of the family wherever it runs."""

    def attends(self, of: Any, layer: int) -> bool:
        """Returns whether a layer has attention. `of`: a config of transformers."""
        if self.recurrence(of, layer) is not None:
            return self.beside
        return self.attention(of, layer) and not self.convolves(of, layer)


BEHIND = Names(
    before_attention="",
    behind_attention="post_attention_layernorm",
    before_mlp="",
    behind_mlp="post_feedforward_layernorm",
)
"""Norms of the results of attention and feed-forward part alone."""
SANDWICH = replace(BEHIND, before_attention="input_layernorm", before_mlp="pre_feedforward_layernorm")
LFM2 = Names(
    out="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    before_attention="operator_norm",
    before_mlp="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    norm="model.embedding_norm",
)
LFM3 = replace(
    LFM2,
    out="self_attn.o_proj",
    behind_attention="post_operator_norm",
    behind_mlp="post_ffn_norm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)
GATE_UP = Names(gate_up=("mlp.gate_up_proj",))
GLM4 = replace(GATE_UP, behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm")

LLAMA = OwnFamily()
CONVOLVING = OwnFamily(
    names=LFM2, activation="silu", convolves=lambda c, layer: c.layer_types[layer] == "conv", sure=False
)
GEMMA = OwnFamily(norm_offset=1.0, embed_scale=lambda config: config.hidden_size**0.5)
GEMMA2 = replace(GEMMA, names=SANDWICH, logit_cap=lambda config: config.final_logit_softcapping or 0.0)
OLMO = OwnFamily(names=BEHIND)
GRANITE = OwnFamily(
    embed_scale=lambda config: config.embedding_multiplier,
    residual_scale=lambda config: config.residual_multiplier,
    logit_scale=lambda config: 1 / config.logits_scaling,
)


COHERE = OwnFamily(
    names=Names(before_mlp=""),
    neighbours=True,
    angles="in pairs",
    centred=True,
    parallel=True,
    logit_scale=lambda config: config.logit_scale,
)


def _ministral3(of: Any) -> QueryGrowth:
    return QueryGrowth(
        of.rope_parameters["llama_4_scaling_beta"], of.rope_parameters["original_max_position_embeddings"]
    )


def _mixtral(of: Any) -> Routing:
    return Routing(experts=of.num_local_experts, chosen=of.num_experts_per_tok, normalise=True)


def _granitemoe(of: Any) -> Routing | None:
    """A softmax over the scores of the best, which is that of all scores made to add up to one."""
    if not of.num_local_experts:
        return None
    return Routing(experts=of.num_local_experts, chosen=of.num_experts_per_tok, normalise=True)


def _gpt_oss(of: Any) -> Routing:
    return Routing(experts=of.num_local_experts, chosen=of.num_experts_per_tok, normalise=True, transposed=True)


def _qwen3_moe(of: Any) -> Routing:
    return Routing(experts=of.num_experts, chosen=of.num_experts_per_tok, normalise=of.norm_topk_prob)


def _qwen3_5_delta(of: Any, layer: int) -> DeltaRule | None:
    if of.layer_types[layer] != "linear_attention":
        return None
    return DeltaRule(
        key_heads=of.linear_num_key_heads,
        value_heads=of.linear_num_value_heads,
        key_width=of.linear_key_head_dim,
        value_width=of.linear_value_head_dim,
        kernel=of.linear_conv_kernel_dim,
        by_key_head=of.model_type == "qwen3_next",
    )


def _mamba2(of: Any, layer: int) -> StateSpace | None:
    if of.layers_block_type[layer] != "linear_attention":
        return None
    return StateSpace(
        key_heads=of.mamba_n_groups,
        value_heads=of.mamba_n_heads,
        key_width=of.mamba_d_state,
        value_width=of.mamba_d_head,
        kernel=of.mamba_d_conv,
        steps=of.time_step_limit or (0.0, math.inf),
    )


def _falcon_h1(of: Any, layer: int) -> StateSpace:
    return StateSpace(
        key_heads=of.mamba_n_groups,
        value_heads=of.mamba_n_heads,
        key_width=of.mamba_d_state,
        value_width=of.mamba_d_head,
        kernel=of.mamba_d_conv,
        steps=of.time_step_limit or (0.0, math.inf),
        gate_last=bool(of.mamba_norm_before_gate and of.mamba_rms_norm),
        plain=not of.mamba_rms_norm,
    )


def _falcon_h1_factors(of: Any) -> Mapping[str, Factors]:
    gate, down = of.mlp_multipliers
    return {
        "qkv": Factors(of.attention_in_multiplier, (1.0, of.key_multiplier, 1.0)),
        "out": Factors(rows=(of.attention_out_multiplier,)),
        "into_recurrence": Factors(of.ssm_in_multiplier, tuple(of.ssm_multipliers)),
        "out_of_recurrence": Factors(rows=(of.ssm_out_multiplier,)),
        "gate_up": Factors(rows=(gate, 1.0)),
        "down": Factors(rows=(down,)),
    }


def _nemotron_h(of: Any, layer: int) -> StateSpace | None:
    """Steps have a least size in transformers, and no bound that its config names (`NemotronHMamba2Mixer.time_step_limit`)."""
    if of.layers_block_type[layer] != "linear_attention":
        return None
    return StateSpace(
        key_heads=of.n_groups,
        value_heads=of.mamba_num_heads,
        key_width=of.ssm_state_size,
        value_width=of.mamba_head_dim,
        kernel=of.conv_kernel,
        steps=(of.time_step_min, math.inf),
    )


def _nemotron_h_routing(of: Any) -> Routing | None:
    if "moe" not in of.layers_block_type:
        return None
    return Routing(
        experts=of.n_routed_experts,
        chosen=of.num_experts_per_tok,
        normalise=of.norm_topk_prob,
        sigmoid=True,
        scale=of.routed_scaling_factor,
        least=1e-20,
    )


def _nemotron_h_lacks(of: Any) -> str:
    if of.mamba_hidden_act != "silu":
        return f"its recurrences have the activation {of.mamba_hidden_act} (mamba_hidden_act), and ours is silu"
    if "moe" in of.layers_block_type and of.n_group > 1:
        return "its experts are chosen within groups of them (n_group)"
    if "moe" in of.layers_block_type and of.moe_latent_size is not None:
        return "its experts work on a latent vector (moe_latent_size)"
    return ""


def _qwen3_5_moe(of: Any) -> Routing:
    return Routing(experts=of.num_experts, chosen=of.num_experts_per_tok, normalise=True)


def _lfm2_moe(of: Any) -> Routing:
    return Routing(
        experts=of.num_experts,
        chosen=of.num_experts_per_tok,
        normalise=of.norm_topk_prob,
        sigmoid=True,
        scale=of.routed_scaling_factor,
    )


MAMBA = Names(
    into_recurrence=("mamba.in_proj",),
    out_of_recurrence="mamba.out_proj",
    recurrence_convolution="mamba.conv1d",
    recurrence_norm="mamba.norm",
    decay="mamba.A_log",
    step_bias="mamba.dt_bias",
    skip="mamba.D",
)


NEMOTRON_H = Names(
    embed="model.embeddings",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    before_attention="norm",
    before_mlp="norm",
    router="mixer.gate",
    experts="mixer.experts",
    experts_in="up_proj",
    choice_bias="mixer.gate.e_score_correction_bias",
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    into_recurrence=("mixer.in_proj",),
    out_of_recurrence="mixer.out_proj",
    recurrence_convolution="mixer.conv1d",
    recurrence_norm="mixer.norm",
    decay="mixer.A_log",
    step_bias="mixer.dt_bias",
    skip="mixer.D",
    norm="model.norm_f",
)
"""A layer is one part of a kind of its own, under one norm."""


def _gemma4_lacks(of: Any) -> str:
    return (
        "it has experts beside a feed-forward part (enable_moe_block)" if getattr(of, "enable_moe_block", False) else ""
    )


QWEN3_5 = OwnFamily(norm_offset=1.0, recurrence=_qwen3_5_delta, gated=True, sure=False)

GEMMA4 = replace(
    GEMMA2,
    norm_offset=0.0,
    values_normed=True,
    placeholders=("image_token_id", "video_token_id", "audio_token_id"),
    lacks=_gemma4_lacks,
    sure=False,
)
FAMILIES: Mapping[str, OwnFamily] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "vaultgemma": replace(GEMMA2, names=Names(before_mlp="pre_feedforward_layernorm")),
    "qwen3_moe": replace(LLAMA, routing=_qwen3_moe),
    "mixtral": replace(LLAMA, routing=_mixtral),
    "olmoe": replace(LLAMA, routing=_qwen3_moe),
    "smollm3": replace(LLAMA, turned=lambda config, layer: bool(config.no_rope_layers[layer])),
    "olmo2": OLMO,
    "olmo3": OLMO,
    "exaone4": replace(
        OLMO, turned=lambda c, layer: not c.sliding_window or c.layer_types[layer] == "sliding_attention"
    ),
    "granite": GRANITE,
    "granitemoe": replace(
        GRANITE,
        names=Names(router="block_sparse_moe.router", experts="block_sparse_moe.experts"),
        routing=_granitemoe,
    ),
    "granitemoeshared": replace(
        GRANITE,
        names=Names(
            router="block_sparse_moe.router",
            experts="block_sparse_moe.experts",
            shared_gate_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
        ),
        routing=_granitemoe,
        sure=False,
    ),
    "granitemoehybrid": replace(
        GRANITE,
        names=replace(
            MAMBA,
            gate_up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            router="block_sparse_moe.router",
            experts="block_sparse_moe.experts",
            shared_gate_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
        ),
        turned=lambda config, layer: config.position_embedding_type == "rope",
        routing=_granitemoe,
        recurrence=_mamba2,
        sure=False,
    ),
    "bamba": OwnFamily(
        names=replace(
            MAMBA,
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            before_mlp="pre_ff_layernorm",
            norm="model.final_layernorm",
        ),
        recurrence=_mamba2,
        sure=False,
    ),
    "falcon_h1": OwnFamily(
        names=replace(
            MAMBA,
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            before_mlp="pre_ff_layernorm",
            norm="model.final_layernorm",
        ),
        embed_scale=lambda config: config.embedding_multiplier,
        logit_scale=lambda config: config.lm_head_multiplier,
        recurrence=_falcon_h1,
        beside=True,
        factors=_falcon_h1_factors,
        sure=False,
    ),
    "nemotron_h": OwnFamily(
        names=NEMOTRON_H,
        turned=_never,
        ungated=True,
        attention=lambda config, layer: config.layers_block_type[layer] == "full_attention",
        recurrence=_nemotron_h,
        routing=_nemotron_h_routing,
        lacks=_nemotron_h_lacks,
        sure=False,
    ),
    "hyperclovax": replace(
        GRANITE,
        names=Names(behind_attention="post_norm1", behind_mlp="post_norm2"),
        logit_scale=lambda config: config.logits_scaling,
    ),
    "arcee": OwnFamily(names=Names(gate_up=("mlp.up_proj",)), ungated=True, sure=False),
    "phi3": OwnFamily(names=replace(GATE_UP, qkv=("self_attn.qkv_proj",)), sure=False),
    "lfm2": CONVOLVING,
    "lfm3": replace(CONVOLVING, names=LFM3),
    "lfm2_moe": replace(
        CONVOLVING,
        names=replace(
            LFM2,
            router="feed_forward.gate",
            experts="feed_forward.experts",
            choice_bias="feed_forward.expert_bias",
            rotary="pos_emb",
        ),
        routing=_lfm2_moe,
    ),
    "qwen2_moe": replace(LLAMA, routing=_qwen3_moe, sure=False),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, routing=_qwen3_5_moe),
    "qwen3_next": replace(
        QWEN3_5,
        names=Names(into_recurrence=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
        routing=_qwen3_moe,
    ),
    "cohere": COHERE,
    "cohere2": replace(
        COHERE, turned=lambda c, layer: bool(c.sliding_window) and c.layer_types[layer] == "sliding_attention"
    ),
    "gpt_oss": OwnFamily(
        names=Names(router="mlp.router"),
        angles="once",
        routing=_gpt_oss,
        clamp=lambda config: Clamp(config.swiglu_alpha, config.swiglu_limit),
    ),
    "glm": OwnFamily(names=GATE_UP, neighbours=True),
    "glm4": OwnFamily(names=GLM4, neighbours=True),
    "ernie4_5": OwnFamily(neighbours=True),
    "helium": OwnFamily(neighbours=True),
    "gemma": GEMMA,
    "ministral": LLAMA,
    "ministral3": replace(LLAMA, grows=_ministral3),
    "seed_oss": LLAMA,
    "cwm": LLAMA,
    "internlm3": LLAMA,
    "iquestcoder": LLAMA,
}
"""Families by `model_type`."""
OWN_FAMILIES = tuple(FAMILIES)
SURE_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.sure)
TEXT_PARTS: Mapping[str, str] = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
}
"""Models of text and images whose part for text, without images, is served alone, and the family that it is of."""
