#!/usr/bin/env python3
"""Writes the CycloneDX bill of materials of a static binary, on standard output.

sbom.py BINARY PROGRAM TARGET VERSION COMMIT TIME [NAME=VERSION]...

Lists the crates that are linked into PROGRAM, tunnel-server or tunnel-agent, for a target of Rust, as
`cargo tree` resolves them for both programs, each with its checksum in Cargo.lock. Programs of the
build (macros, build scripts) are not in the binary. NAME=VERSION adds a library of the toolchain,
rust-std or glibc. The same arguments and sources result in the same bytes.
"""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path

LINE = re.compile(r"(\d+)\|(\S+) v(\S+?)(?: \((?:proc-macro|/.*)\))*\|([^|]*)\|(.*?)(?: \(\*\))?$")
LICENSES = {"rust-std": "MIT OR Apache-2.0", "glibc": "LGPL-2.1-or-later"}


def tree(target):
    """Returns each crate with its license and repository, and the crates that it depends on."""
    command = ["cargo", "tree", "--locked", "--target", target, "-e", "normal,no-proc-macro", "--prefix", "depth"]
    command += ["-p", "tunnel-server", "-p", "tunnel-agent", "--format", "|{p}|{l}|{r}"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    crates, edges, path = {}, {}, []
    for line in filter(None, lines):
        depth, name, version, license_text, repository = LINE.match(line).groups()
        crate = (name, version)
        crates[crate] = (license_text, repository)
        edges.setdefault(crate, set())
        path[int(depth) :] = [crate]
        if len(path) > 1:
            edges[path[-2]].add(crate)
    return crates, edges


def reachable(edges, root):
    """Returns a crate and all crates below it."""
    found, pending = {root}, [root]
    while pending:
        new = edges[pending.pop()] - found
        found |= new
        pending += new
    return found


def component(crate, details, checksums):
    """Returns the entry of a crate."""
    name, version = crate
    license_text, repository = details
    entry = {"type": "library", "bom-ref": reference(crate), "name": name, "version": version}
    if crate in checksums:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksums[crate]}]
    entry["licenses"] = [{"expression": " ".join(license_text.replace("/", " OR ").split())}]
    if crate in checksums:
        entry["purl"] = reference(crate)
    if repository:
        entry["externalReferences"] = [{"type": "vcs", "url": repository}]
    return entry


def reference(crate):
    """Returns the package URL of a crate."""
    return f"pkg:cargo/{crate[0]}@{crate[1]}".replace("+", "%2B")


def bill(binary, program, target, version, commit, time, libraries):
    """Returns the bill of materials."""
    crates, edges = tree(target)
    root = (program, version)
    if root not in crates:
        sys.exit(f"sbom.py: the sources have no {program} {version}")
    lock = tomllib.loads(Path("Cargo.lock").read_text(encoding="utf-8"))
    checksums = {(p["name"], p["version"]): p["checksum"] for p in lock["package"] if "checksum" in p}
    linked = sorted(reachable(edges, root))
    digest = hashlib.sha256(Path(binary).read_bytes()).hexdigest()
    main = component(root, crates[root], checksums) | {
        "type": "application",
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "properties": [{"name": "culvert:commit", "value": commit}, {"name": "culvert:target", "value": target}],
    }
    components = [component(crate, crates[crate], checksums) for crate in linked if crate != root]
    toolchain = []
    for library in libraries:
        name, _, number = library.partition("=")
        entry = {"type": "library", "bom-ref": f"pkg:generic/{name}@{number}", "name": name, "version": number}
        entry["licenses"] = [{"expression": LICENSES[name]}]
        toolchain.append(entry | {"purl": entry["bom-ref"]})
    below = {crate: sorted(map(reference, edges[crate])) for crate in linked}
    below[root] += [entry["bom-ref"] for entry in toolchain]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {"timestamp": time, "component": main},
        "components": components + toolchain,
        "dependencies": [{"ref": reference(crate), "dependsOn": refs} for crate, refs in below.items()],
    }


if __name__ == "__main__":
    arguments = sys.argv[1:]
    document = bill(*arguments[:6], arguments[6:])
    print(json.dumps(document, indent=1, ensure_ascii=False))
