"""A report is one file: its data stay data, and its policy allows no connection."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from elasticd.dashboard.single_file import single_file

HOSTILE = '</script><script>alert(1)</script><!-- <img src=x onerror="alert(1)">'


def test_text_of_others_stays_data() -> None:
    text = single_file({"/api/cluster": {"cluster": HOSTILE}}, HOSTILE)
    assert "alert(1)" in text
    assert HOSTILE not in text
    found = re.search(r'<script type="application/json" id="recording">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == {"/api/cluster": {"cluster": HOSTILE}}
    assert "<title>&lt;/script&gt;" in text


def test_policy_allows_the_file_itself_and_nothing_else() -> None:
    text = single_file({}, "report")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    assert "connect-src" not in policy[1]
    for kind in ("importmap", "module"):
        inline = re.search(rf'<script type="{kind}">(.*?)</script>', text, re.DOTALL)
        assert inline is not None
        digest = base64.b64encode(hashlib.sha256(inline[1].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', text.split("<body>")[0])


def test_every_import_is_one_of_the_map() -> None:
    found = re.search(r'<script type="importmap">(.*?)</script>', single_file({}, ""), re.DOTALL)
    assert found is not None
    modules = json.loads(found[1])["imports"]
    sources = {name: base64.b64decode(url.partition(",")[2]).decode() for name, url in modules.items()}
    imported = {
        name
        for text in sources.values()
        for name in re.findall(
            r'^(?:import |(?:import|export|\}) ?[^"\n]*from )"([^"]+)";$', text, re.MULTILINE
        )
    }
    assert imported <= set(modules)
    assert len(modules) - len(imported) == 1, "all but the first are imported by another"
