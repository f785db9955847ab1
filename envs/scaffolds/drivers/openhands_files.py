"""Files inside a sandbox for OpenHands' file editor.

The editor is OpenHands' own, and so are its answers. Before a command the one file (or listing) that it is about is fetched
into a scratch folder, under the same path; afterwards what changed is put back. The policy's paths are only ever joined to the
scratch folder, nothing in it is a link, and its name is taken out of every answer.
"""

import base64
import os
import posixpath
import shlex
import shutil
from pathlib import Path
from typing import Any

from driver_lines import AskError
from openhands.sdk.tool import ToolExecutor, register_tool
from openhands.tools.file_editor import definition, impl
from openhands.tools.file_editor.definition import FileEditorObservation

LOOK = r"""
if [[ -d $p ]]; then echo folder; find "$p" -mindepth 1 -maxdepth 2 -printf '%y %P\n' 2>/dev/null | head -n 5000
elif [[ ! -e $p && ! -L $p ]]; then echo missing
elif [[ -f $p && -r $p ]]; then echo file; wc -c <"$p"
else echo other; fi
"""
MOST_BYTES = 16 << 20


class SandboxFiles(ToolExecutor):
    """OpenHands' executor of the file editor, over a scratch folder that stands for the sandbox's root."""

    def __init__(self, lines: Any, workdir: str, scratch: str) -> None:
        self._lines = lines
        self._root = Path(scratch) / "files"
        self._own = _OwnExecutor(workspace_root=f"{self._root}{workdir}")

    def __call__(self, action: Any, conversation: Any = None) -> Any:
        """Run one command of the editor. What the sandbox refuses is an error observation."""
        path = str(action.path)
        if not path.startswith("/") or "\0" in path:
            return self._error(action, f"Invalid `path` parameter: {path!r}. The path should be an absolute path.")
        inside = posixpath.normpath("/" + path.lstrip("/"))
        shadow = Path(f"{self._root}{inside}")
        try:
            before = self._fetch(inside, shadow)
            done = self._own(action.model_copy(update={"path": str(shadow)}), conversation)
            after = shadow.read_bytes() if shadow.is_file() else None
            if action.command != "view" and after is not None and after != before:
                self._lines.ask("write", path=inside, data=base64.b64encode(after).decode())
        except (AskError, OSError) as error:
            return self._error(action, self._clean(str(error)))
        return self._cleaned(done, inside)

    def _fetch(self, inside: str, shadow: Path) -> bytes | None:
        """Make the scratch folder hold what stands at `inside`, and nothing else."""
        shutil.rmtree(self._root, ignore_errors=True)
        shadow.parent.mkdir(parents=True, exist_ok=True)
        asked = self._lines.ask("exec", command=f"p={shlex.quote(inside)}" + LOOK, cwd="/", timeout_s=60.0)
        kind, _, rest = asked["stdout"].partition("\n")
        if kind == "folder":
            self._list(shadow, rest.splitlines())
        elif kind == "file":
            return self._copy(inside, shadow, int(rest))
        elif kind != "missing":
            raise OSError(f"{inside} is no file or folder that can be read")
        return None

    def _copy(self, inside: str, shadow: Path, size: int) -> bytes | None:
        if size > MOST_BYTES:  # the editor itself says that it is too large
            with shadow.open("wb") as file:
                os.ftruncate(file.fileno(), size)
            return None
        data = base64.b64decode(self._lines.ask("read", path=inside)["data"])
        shadow.write_bytes(data)
        return data

    def _list(self, shadow: Path, entries: list[str]) -> None:
        shadow.mkdir(exist_ok=True)
        for kind, name in (entry.split(" ", 1) for entry in entries if " " in entry):
            place = shadow / name
            if ".." in place.relative_to(shadow).parts:
                continue
            if kind == "d":
                place.mkdir(parents=True, exist_ok=True)
            elif place.parent.is_dir():
                place.touch()

    def _clean(self, text: str) -> str:
        return text.replace(str(self._root), "")

    def _cleaned(self, done: Any, inside: str) -> Any:
        """An answer that speaks of the sandbox's paths."""
        content = [
            part.model_copy(update={"text": self._clean(part.text)}) if hasattr(part, "text") else part
            for part in done.content
        ]
        return done.model_copy(update={"content": content, "path": inside})

    def _error(self, action: Any, text: str) -> Any:
        return FileEditorObservation.from_text(text=text, command=action.command, is_error=True)

    def close(self) -> None:
        """Nothing is held."""

    def interrupt(self) -> None:
        """Nothing runs for long."""


_OwnExecutor = impl.FileEditorExecutor
_own_create = definition.FileEditorTool.create.__func__


def use_files(lines: Any, workdir: str, scratch: str) -> None:
    """From now on OpenHands' file editor works on the sandbox's files, and says that it starts in `workdir`."""

    def make_executor(**_: Any) -> SandboxFiles:
        return SandboxFiles(lines, workdir, scratch)

    def create(cls: Any, conv_state: Any) -> Any:
        place = str(conv_state.workspace.working_dir)
        made = _own_create(cls, conv_state)
        return [tool.model_copy(update={"description": tool.description.replace(place, workdir)}) for tool in made]

    setattr(impl, "FileEditorExecutor", make_executor)  # noqa: B010
    setattr(definition.FileEditorTool, "create", classmethod(create))  # noqa: B010
    register_tool(definition.FileEditorTool.name, definition.FileEditorTool)  # the catalogue holds the method as it was
