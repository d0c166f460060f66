"""Rotary embedding in Hugging Face's config.json: read in the old spelling and the newer, written in the old one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.hf_families import FULL, SLIDING
from kvjax.models.json_file import Section
from kvjax.ops.rotary import longrope_attention_factor, yarn_attention_factor


def ropes(section: Section, family: str) -> dict[str, Any]:
    """Returns the rotary embedding, and that of sliding layers if the family has another one for them."""
    if family != "gemma3_text":
        return {"rope": _rope(section, family)}
    newer: Any = section.fields.get("rope_parameters")
    of_kind = {kind: newer[kind] for kind in (FULL, SLIDING) if kind in newer} if isinstance(newer, dict) else {}

    def part(kind: str, theta: str) -> RopeConfig:
        fields = {**section.fields, "rope_theta": section.fields[theta], "rope_parameters": of_kind.get(kind)}
        if kind == SLIDING:
            fields["rope_scaling"] = None
        return _rope(dataclasses.replace(section, fields=fields), family)

    if newer is not None and not of_kind:
        raise section.wrong("rope_parameters", f"expected an object with {FULL!r} and {SLIDING!r}")
    return {"rope": part(FULL, "rope_theta"), "local_rope": part(SLIDING, "rope_local_base_freq")}


def _rope(section: Section, family: str) -> RopeConfig:
    """Returns the rotary embedding from `rope_scaling` and `rope_theta`, or from the newer `rope_parameters`."""
    name = "rope_parameters" if section.fields.get("rope_scaling") in (None, {}) else "rope_scaling"
    scaling = section.fields.get(name)
    scaling = {} if scaling is None else scaling
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise section.wrong(name, "expected null or one object of plain values for all layers")
    # Older files hold these under the key `type`, and beside the object instead of in it.
    inherited = {"rope_type": scaling.get("type", "default"), "rope_theta": section.fields["rope_theta"],
                 "partial_rotary_factor": section.fields.get("partial_rotary_factor")}
    rope = Section(section.path, inherited | scaling, f"{name}.")
    if family == "phi3":
        return _phi3_rope(section, rope)
    rope.require("partial_rotary_factor", (None, 1.0))
    kind = rope.require("rope_type", ("default", *_STRETCHED))
    base = RopeConfig(rope.number("rope_theta"))
    return base if kind == "default" else _STRETCHED[kind](section, rope, base)


def _phi3_rope(section: Section, rope: Section) -> RopeConfig:
    """Returns the rotary embedding of Phi-3, whose older files call longrope su, or yarn."""
    kind = rope.require("rope_type", ("default", "longrope", "su", "yarn"))
    outside = section.fields.get("partial_rotary_factor")
    stated = rope if outside is None or kind == "default" else section  # as transformers overwrites the inner one
    base = RopeConfig(rope.number("rope_theta"), partial=stated.number("partial_rotary_factor", default=1.0))
    return base if kind == "default" else _longrope(section, rope, base)


def _linear(_: Section, rope: Section, base: RopeConfig) -> RopeConfig:
    return dataclasses.replace(base, kind="linear", factor=rope.number("factor"))


def _dynamic(section: Section, rope: Section, base: RopeConfig) -> RopeConfig:
    length = section.integer("max_position_embeddings")
    return dataclasses.replace(base, kind="dynamic", factor=rope.number("factor"), original_max_position=length)


def _llama3(section: Section, rope: Section, base: RopeConfig) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise rope.wrong("high_freq_factor", f"expected more than low_freq_factor, which is {low}")
    return dataclasses.replace(
        base, kind="llama3", factor=rope.number("factor"), low_freq_factor=low, high_freq_factor=high,
        original_max_position=_original_max_position(section, rope),
    )


def _yarn(section: Section, rope: Section, base: RopeConfig) -> RopeConfig:
    original, factor = _original_and_factor(section, rope)
    if base.theta <= 1:
        raise rope.wrong("rope_theta", "yarn expects more than 1")
    mscale, of_all = (rope.number(name, None, zero_is_none=True) for name in ("mscale", "mscale_all_dim"))
    recommended = yarn_attention_factor(factor)
    if mscale and of_all:
        recommended = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, of_all)
    return dataclasses.replace(
        base, kind="yarn", factor=factor, original_max_position=original,
        attention_factor=rope.number("attention_factor", recommended),
        beta_fast=rope.number("beta_fast", 32.0, zero_is_none=True),
        beta_slow=rope.number("beta_slow", 1.0, zero_is_none=True), truncate=rope.switch("truncate", True),
    )


def _longrope(section: Section, rope: Section, base: RopeConfig) -> RopeConfig:
    original, factor = _original_and_factor(section, rope)
    if original < 2:
        raise rope.wrong("original_max_position_embeddings", "longrope expects at least 2")
    return dataclasses.replace(
        base, kind="longrope", original_max_position=original, short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
        attention_factor=rope.number("attention_factor", longrope_attention_factor(factor, original)),
    )


_STRETCHED: dict[str, Callable[[Section, Section, RopeConfig], RopeConfig]] = {
    "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "dynamic": _dynamic,
}


def _original_and_factor(section: Section, rope: Section) -> tuple[int, float]:
    """Returns the length first trained on, and how many times as long texts may be."""
    original = _original_max_position(section, rope)
    return original, rope.number("factor", section.integer("max_position_embeddings") / original)


def _original_max_position(section: Section, rope: Section) -> int:
    """Returns the length first trained on; as in transformers, the field beside the rope settings comes first."""
    name = "original_max_position_embeddings"
    inside = rope.integer(name, default=section.integer("max_position_embeddings"))
    return section.integer(name, default=inside)


def scaling_fields(config: ModelConfig) -> dict[str, Any] | None:
    """Returns the content of `rope_scaling`."""
    rope = config.rope
    original = {"original_max_position_embeddings": rope.original_max_position}
    match rope.kind:
        case "default":
            return None
        case "longrope":
            own: dict[str, Any] = {name: list(getattr(rope, name)) for name in ("short_factor", "long_factor")}
            factor = config.max_position / rope.original_max_position
            if config.family != "phi3":
                own |= original
            elif rope.attention_factor == longrope_attention_factor(factor, rope.original_max_position):
                return {"type": "longrope", **own}  # transformers 4 refuses further fields and `rope_type`
            return {"type": "longrope", **own, "attention_factor": rope.attention_factor}
        case "yarn":
            own = {name: getattr(rope, name) for name in ("attention_factor", "beta_fast", "beta_slow", "truncate")}
            own |= original
        case "llama3":
            own = {name: getattr(rope, name) for name in ("low_freq_factor", "high_freq_factor")} | original
        case _:
            own = {}
    return {"rope_type": rope.kind, "factor": rope.factor, **own}
