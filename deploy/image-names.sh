# Sourced by images.sh and manifests.sh: checks PREFIX and TAG, which make the names of the two
# images, ${PREFIX}tunnel-server:$TAG and ${PREFIX}tunnel-agent:$TAG. There is no default registry,
# because any name that is chosen here may belong to others.

# check_prefix PREFIX: prints why no image may have this prefix, and returns 1. A container runtime
# expands a name without a registry to a name of docker.io.
check_prefix() {
  local host=${1%%/*} component='[a-z0-9]+([._-]+[a-z0-9]+)*'
  if [ -z "$1" ]; then
    echo "PREFIX is not set; name your registry, as in PREFIX=registry.example.com/culvert/" >&2
  elif ! [[ $1 =~ ^[A-Za-z0-9.-]+(:[0-9]+)?/($component/)*$ ]]; then
    echo "PREFIX=$1 is not HOST[:PORT]/[PATH/], as in registry.example.com/culvert/" >&2
  elif [[ $host != *[.:]* && $host != localhost ]]; then
    echo "PREFIX=$1 names no registry: a container runtime takes it for docker.io/$1" >&2
  else
    return 0
  fi
  return 1
}

# check_tag TAG: prints why this is no tag, and returns 1.
check_tag() {
  [[ $1 =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$ ]] && return 0
  if [ -z "$1" ]; then echo "TAG is not set, as in TAG=0.1.0" >&2; else echo "TAG=$1 is not a tag" >&2; fi
  return 1
}
