# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hub without a network: commits land in the local cache, from which `from_pretrained` reads by repository name."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitInfo, CommitOperationAdd, RepoUrl, constants
from huggingface_hub.utils import filter_repo_objects


class FakeHub:
    """Repositories as folders of the cache (`models--owner--name/snapshots/<commit>`).

    Attributes:
        cache: Folder of the cache.
        commits: (repository, message) of every commit, in order.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.commits: list[tuple[str, str]] = []

    def snapshot(self, repo_id: str) -> Path:
        """The files of the newest commit."""
        repository = self._repository(repo_id)
        return repository / "snapshots" / (repository / "refs" / "main").read_text()

    def _repository(self, repo_id: str) -> Path:
        return self.cache / f"models--{repo_id.replace('/', '--')}"

    def create_repo(self, repo_id: str, **kwargs) -> RepoUrl:
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, repo_id: str, operations, *, commit_message: str, **kwargs) -> CommitInfo:
        repository = self._repository(repo_id)
        commit = hashlib.sha1(f"{repo_id} {len(self.commits)}".encode()).hexdigest()
        target = repository / "snapshots" / commit
        if (repository / "refs" / "main").exists():
            shutil.copytree(self.snapshot(repo_id), target)
        for operation in operations:
            assert isinstance(operation, CommitOperationAdd)
            path = target / operation.path_in_repo
            path.parent.mkdir(parents=True, exist_ok=True)
            with operation.as_file() as content:
                path.write_bytes(content.read())
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        self.commits.append((repo_id, commit_message))
        url = f"https://huggingface.co/{repo_id}/commit/{commit}"
        return CommitInfo(commit_url=url, commit_message=commit_message, commit_description="", oid=commit)

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str | Path,
        commit_message: str = "Upload folder",
        ignore_patterns: list[str] | None = None,
        **kwargs,
    ) -> CommitInfo:
        files = [file.relative_to(folder_path) for file in Path(folder_path).rglob("*") if file.is_file()]
        names = filter_repo_objects([file.as_posix() for file in files], ignore_patterns=ignore_patterns)
        operations = [CommitOperationAdd(name, Path(folder_path, name)) for name in names]
        return self.create_commit(repo_id, operations, commit_message=commit_message)


@pytest.fixture
def fake_hub(tmp_path, monkeypatch) -> FakeHub:
    hub = FakeHub(tmp_path / "cache")
    api = huggingface_hub.HfApi
    monkeypatch.setattr(api, "create_repo", lambda self, *args, **kwargs: hub.create_repo(*args, **kwargs))
    monkeypatch.setattr(api, "create_commit", lambda self, *args, **kwargs: hub.create_commit(*args, **kwargs))
    monkeypatch.setattr(api, "upload_folder", lambda self, *args, **kwargs: hub.upload_folder(*args, **kwargs))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return hub
