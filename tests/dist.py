#!/usr/bin/env python3
"""Checks the files of `make dist`: all are there, of one version and one commit, and hold the same
binaries, whose images are within their sizes.

dist.py DIR [ARCH...], for amd64 and arm64 by default. Run it in the clone that DIR was built from.
Needs dpkg-deb, rpm and rpm2cpio, cpio, and qemu-user-static for the architectures of other machines.
"""

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
ELF_MACHINES = {"amd64": 62, "arm64": 183}
# Bytes of an image for one architecture, as a node pulls it, and unpacked as containers run it.
SIZES = {"tunnel-server": 24_000_000, "tunnel-agent": 12_000_000}

failures = []


def check(condition, text):
    """Counts and prints a failure."""
    if not condition:
        failures.append(text)
        print(f"dist: {text}", file=sys.stderr)


def output(*command, data=None):
    """Returns what a command prints."""
    return subprocess.run(command, check=True, input=data, stdout=subprocess.PIPE).stdout


def runner(arch):
    """Returns the command in front of binaries of an architecture, or None if nothing here runs them."""
    if MACHINES[arch] == platform.machine():
        return []
    emulator = shutil.which(f"qemu-{MACHINES[arch]}-static")
    return emulator and [emulator]


def sums(folder):
    """Checks SHA256SUMS, and that it has a line for each file."""
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    there = {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    check(set(listed) == there, f"SHA256SUMS and the files differ: {sorted(set(listed) ^ there)}")
    for name in there & set(listed):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        check(listed[name] == digest, f"{name} has another checksum than in SHA256SUMS")


def binary(path, program, arch, release):
    """Checks a static binary."""
    content = path.read_bytes()
    check(content[:6] == b"\x7fELF\x02\x01", f"{path.name} is not an ELF file")
    machine = int.from_bytes(content[18:20], "little")
    check(machine == ELF_MACHINES[arch], f"{path.name} is for another machine: {machine}")
    check(b"ld-linux" not in content[:4096], f"{path.name} needs shared libraries")
    check(release.commit.encode() in content, f"{path.name} is not of commit {release.commit}")
    command = runner(arch)
    if command is None:
        print(f"dist: skip: nothing here runs {path.name}")
        return
    # The program prints the name that it has, not that of the file.
    printed = output(*command, str(path), "version").decode().split()
    check(printed == [program, release.version], f"{path.name} is {printed}")


def bill(path, program, content, release):
    """Checks a bill of materials."""
    document = json.loads(path.read_text(encoding="utf-8"))
    main = document["metadata"]["component"]
    commit = [p["value"] for p in main["properties"] if p["name"] == "culvert:commit"]
    check(document["bomFormat"] == "CycloneDX", f"{path.name} is not of CycloneDX")
    check([main["name"], main["version"]] == [program, release.version], f"{path.name} is of {main['name']} {main['version']}")
    check(commit == [release.commit], f"{path.name} is of commit {commit}")
    digest = hashlib.sha256(content).hexdigest()
    check(main["hashes"] == [{"alg": "SHA-256", "content": digest}], f"{path.name} is of another binary")
    entries = {entry["bom-ref"] for entry in document["components"]} | {main["bom-ref"]}
    names = {entry["name"] for entry in document["components"]}
    check({"aws-lc-sys", "rustls", "tunnel-proto", "rust-std", "glibc"} <= names, f"{path.name} lacks libraries")
    unknown = {ref for edge in document["dependencies"] for ref in [edge["ref"], *edge["dependsOn"]]} - entries
    check(not unknown, f"{path.name} refers to {unknown}")
    unchecked = [e["name"] for e in document["components"] if e["bom-ref"].startswith("pkg:cargo/") and "hashes" not in e]
    check("tunnel-proto" in unchecked and all(name.startswith("tunnel-") for name in unchecked), f"{path.name} has crates without a checksum: {unchecked}")


def packages(folder, program, arch, content, release):
    """Checks the Debian package and the RPM package, which have the same files."""
    deb = folder / f"culvert-{program}_{release.label}-1_{arch}.deb"
    fields = output("dpkg-deb", "-f", str(deb), "Package", "Version", "Architecture").decode().splitlines()
    expected = [f"Package: culvert-{program}", f"Version: {release.label}-1", f"Architecture: {arch}"]
    check(sorted(fields) == sorted(expected), f"{deb.name} is of {fields}")
    with tarfile.open(fileobj=io.BytesIO(output("dpkg-deb", "--fsys-tarfile", str(deb)))) as files:
        check(files.extractfile(f"./usr/bin/{program}").read() == content, f"{deb.name} has another binary")
        in_deb = {entry.name.removeprefix(".") for entry in files if entry.isfile()}

    rpm = folder / f"culvert-{program}-{release.label}-1.{MACHINES[arch]}.rpm"
    named = output("rpm", "-qp", "--qf", "%{NAME} %{VERSION}-%{RELEASE} %{ARCH} %{OS}", str(rpm)).decode().split()
    expected = [f"culvert-{program}", f"{release.label}-1", MACHINES[arch], "linux"]
    check(named == expected, f"{rpm.name} is of {named}")
    check(b"digests OK" in output("rpm", "-K", str(rpm)), f"{rpm.name} is damaged")
    configuration = output("rpm", "-qpc", str(rpm)).decode().split()
    check(configuration == [f"/etc/culvert/{program}.yaml"], f"{rpm.name} has the configuration files {configuration}")
    archive = output("rpm2cpio", str(rpm))
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["cpio", "--quiet", "-idm"], check=True, input=archive, cwd=unpacked)
        same = (Path(unpacked) / "usr/bin" / program).read_bytes() == content
        in_rpm = {f"/{path.relative_to(unpacked)}" for path in Path(unpacked).rglob("*") if path.is_file()}
    check(same, f"{rpm.name} has another binary")
    moved = {path.replace("/vendor-completions/", "/site-functions/") for path in in_deb}
    moved = {path.replace("/lib/systemd/", "/usr/lib/systemd/", 1) if path.startswith("/lib/") else path for path in moved}
    differ = {path for path in moved ^ in_rpm if not re.match("/usr/share/(doc|licenses|lintian)/", path)}
    check(not differ, f"{rpm.name} and {deb.name} differ in {sorted(differ)}")
    check(any("completion" in path for path in in_rpm), f"{rpm.name} has no completions")
    check(any("/licenses/" in path for path in in_rpm), f"{rpm.name} has no license")


def image(path, program, binaries, release):
    """Checks an image in an OCI layout: each architecture's configuration, binary and size."""
    with tarfile.open(path) as layout:

        def blob(descriptor):
            content = layout.extractfile("./blobs/" + descriptor["digest"].replace(":", "/")).read()
            digest = "sha256:" + hashlib.sha256(content).hexdigest()
            check(digest == descriptor["digest"] and len(content) == descriptor["size"], f"{path.name} is damaged")
            return content

        top = json.load(layout.extractfile("./index.json"))["manifests"]
        manifests = json.loads(blob(top[0]))["manifests"]
        found = sorted(entry["platform"]["architecture"] for entry in manifests)
        check(len(top) == 1 and found == sorted(binaries), f"{path.name} is for {found}")
        for entry in manifests:
            arch = entry["platform"]["architecture"]
            manifest = json.loads(blob(entry))
            config = json.loads(blob(manifest["config"]))
            layers = [(layer["size"], blob(layer)) for layer in manifest["layers"]]
            labels = config["config"]["Labels"]
            check(config["architecture"] == arch, f"{path.name}: {arch} is for {config['architecture']}")
            check(config["config"]["User"] == "65532:65532", f"{path.name}: {arch} runs as {config['config']['User']}")
            check(labels["org.opencontainers.image.version"] == release.version, f"{path.name}: {arch} is of another version")
            check(labels["org.opencontainers.image.revision"].startswith(release.commit), f"{path.name}: {arch} is of another commit")
            content = None
            for _, layer in layers:
                with tarfile.open(fileobj=io.BytesIO(layer), mode="r:gz") as files:
                    if program in files.getnames():
                        content = files.extractfile(program).read()
            check(content == binaries.get(arch), f"{path.name}: {arch} has another binary")
            pulled = sum(size for size, _ in layers)
            print(f"dist: image of {program} for {arch}: {pulled / 1e6:.1f} MB pulled, {len(content or b'') / 1e6:.1f} MB unpacked")
            check(pulled <= SIZES[program], f"{path.name}: {arch} has {pulled} bytes, more than {SIZES[program]}")


class Release:
    """The version and commit that all files have to be of."""

    def __init__(self, folder):
        cargo = Path("Cargo.toml").read_text(encoding="utf-8")
        self.version = re.search(r'^\[workspace\.package\]\nversion = "(.*)"', cargo, re.M).group(1)
        self.commit = output("git", "rev-parse", "--short=12", "HEAD").decode().strip()
        labels = {path.name.removeprefix("tunnel-agent-").removesuffix(".oci.tar") for path in folder.glob("tunnel-agent-*.oci.tar")}
        check(len(labels) == 1, f"the images are of {sorted(labels)}")
        self.label = labels.pop() if labels else self.version
        is_snapshot = self.label.startswith(f"{self.version}~") and self.label.endswith(f".{self.commit[:8]}")
        check(self.label == self.version or is_snapshot, f"the files are of {self.label}, the sources of {self.version} {self.commit}")


def main(folder, architectures):
    """Checks a folder."""
    folder = Path(folder)
    release = Release(folder)
    sums(folder)
    names = {"SHA256SUMS"}
    for program in SIZES:
        binaries = {}
        for arch in architectures:
            path = folder / f"{program}-{release.label}-linux-{arch}"
            content = binaries[arch] = path.read_bytes()
            binary(path, program, arch, release)
            bill(folder / f"{path.name}.cdx.json", program, content, release)
            packages(folder, program, arch, content, release)
            names |= {path.name, f"{path.name}.cdx.json", f"culvert-{program}_{release.label}-1_{arch}.deb"}
            names.add(f"culvert-{program}-{release.label}-1.{MACHINES[arch]}.rpm")
        image(folder / f"{program}-{release.label}.oci.tar", program, binaries, release)
        names.add(f"{program}-{release.label}.oci.tar")
    there = {path.name for path in folder.iterdir()}
    check(there == names, f"other files than expected: {sorted(there ^ names)}")
    if failures:
        sys.exit(f"dist: {len(failures)} checks failed")
    print(f"dist: all {len(names)} files are of {release.label}, commit {release.commit}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(MACHINES))
