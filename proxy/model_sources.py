"""Where the files of a model that is served with runners of our own come from.

A source is looked at for each start of a runner: Ollama's `pull` puts another file in
the place of the old one, which it removes.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from proxy.errors import ConfigError
from proxy.llamacpp.embedded import ModelFiles
from proxy.llamacpp.gguf_facts import load_facts
from proxy.ollama_folder import (
    NO_MODELFILE,
    Modelfile,
    OllamaName,
    check_digest,
    find_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model file, or a model in Ollama's folder, and perhaps a projector."""

    model: Path | OllamaName
    projector: Path | None = None
    """Goes before one that the model brings along."""

    async def look(self, cache_dir: Path) -> ModelFiles:
        """Find the files and read what they say. Raises ConfigError."""
        path, projector, modelfile = await asyncio.to_thread(self._find)
        facts = await load_facts(path, cache_dir)
        check_digest(modelfile, facts.file_sha256)
        if projector is not None:
            projector_facts = await load_facts(projector, cache_dir)
        else:
            projector_facts = None
        return ModelFiles(
            path=path,
            facts=facts,
            projector=projector,
            projector_facts=projector_facts,
            modelfile=modelfile,
        )

    def _find(self) -> tuple[Path, Path | None, Modelfile]:
        if isinstance(self.model, Path):
            return self.model, self.projector, NO_MODELFILE
        modelfile = find_model(self.model.name)
        weights, projector = modelfile.layer("model"), modelfile.layer("projector")
        if weights is None:
            raise ConfigError(f"{modelfile.source}: it has no model file")
        own = projector.path if projector else None
        return weights.path, self.projector or own, modelfile
