"""The dashboard's pages in one HTML file with the values that they show: no server, no network.

The modules of the pages import each other by relative paths, which a file alone does not have. So each becomes
a `data:` URL, under a name of an import map, and its imports are rewritten to these names. The policy in the
file allows these scripts and this style alone, and no connection to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import posixpath
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

STATIC = files("elasticd.dashboard") / "static"
#: How the import map names a module.
_NAME = "elasticd/"
#: The import of a module by a relative path, at the begin of a line.
_IMPORT = re.compile(r'^((?:import|export|\}) ?(?:[^"\n]* from )?)"(\.{1,2}/[^"]+\.js)";$', re.MULTILINE)
_STYLES = ("vendor/uplot.css", "style.css")


def single_file(values: Mapping[str, Any], title: str) -> str:
    """The HTML. `values`: what pages ask for by path, as "/api/cluster". `title`: of the window at first."""
    modules = {_NAME + path: _url(_rewritten(path, text)) for path, text in _modules(STATIC).items()}
    imports = msgspec.json.encode({"imports": modules}).decode()
    start = f'import "{_NAME}app.js";'
    style = "\n".join((STATIC / name).read_text("utf-8") for name in _STYLES)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(imports)} {_hash(start)} data:",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types lit-html",
        ]
    )
    return f"""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8" />
    <meta http-equiv="Content-Security-Policy" content="{policy}" />
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <meta name="color-scheme" content="light dark" />
    <title>{html.escape(title)}</title>
    <style>{style}</style>
    <script type="application/json" id="recording">{_data(values)}</script>
    <script type="importmap">{imports}</script>
  </head>
  <body>
    <ed-app></ed-app>
    <script type="module">{start}</script>
  </body>
</html>
"""


def _modules(folder: Traversable, path: str = "") -> dict[str, str]:
    """The text of each module, by its path below the folder."""
    modules: dict[str, str] = {}
    for item in folder.iterdir():
        if item.is_dir():
            modules |= _modules(item, f"{path}{item.name}/")
        elif item.name.endswith(".js"):
            modules[path + item.name] = item.read_text("utf-8")
    return modules


def _rewritten(path: str, text: str) -> str:
    """A module whose imports are by names of the import map."""

    def named(found: re.Match[str]) -> str:
        return f'{found[1]}"{_NAME}{posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))}";'

    return _IMPORT.sub(named, text)


def _url(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def _hash(text: str) -> str:
    """As a policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(values: Mapping[str, Any]) -> str:
    """JSON that cannot end the element that it stands in."""
    return msgspec.json.encode(values).decode().replace("<", "\\u003c")
