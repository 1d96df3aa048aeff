# Sourced by the scripts that build and test artifacts of more than one architecture, which have
# Debian's names, also those of images: amd64 and arm64.

# architecture FILE: prints the architecture of an ELF file, or why there is none, and returns 1. Bytes
# 4 and 5 are class and byte order, 18 and 19 the machine.
architecture() {
  case $(od -An -v -tx1 -N20 "$1" | tr -d ' \n') in
    7f454c460201*3e00) echo amd64 ;;
    7f454c460201*b700) echo arm64 ;;
    *) echo "$1 is not an ELF file for amd64 or arm64"; return 1 ;;
  esac
}

# machine ARCH: prints the kernel's name of an architecture, which is also that of Rust and rpm.
machine() {
  case $1 in
    amd64) echo x86_64 ;;
    arm64) echo aarch64 ;;
    *) echo "unknown-$1" ;;
  esac
}

# triple ARCH: prints the target of the static binaries.
triple() { echo "$(machine "$1")-unknown-linux-gnu"; }

# this_architecture: prints the architecture of this machine.
this_architecture() {
  case $(uname -m) in
    x86_64) echo amd64 ;;
    aarch64) echo arm64 ;;
    *) uname -m ;;
  esac
}

# runner ARCH: prints the program that runs binaries of another architecture, if it is installed
# (Debian: qemu-user-static). Prints nothing for the architecture of this machine.
runner() {
  [ "$1" = "$(this_architecture)" ] || command -v "qemu-$(machine "$1")-static" || true
}
