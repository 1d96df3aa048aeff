# Each target is a line or two that a person can also type. `make help` lists them.

ARGS ?=
HOURS ?= 1
ROUNDS ?= 5

.DEFAULT_GOAL := help
.PHONY: help demo test soak faults bench bench-compare bench-guards lint audit docs tools static images images-test manifests

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

demo: ## the guided tour; ARGS=--once checks each answer and exits
	@tests/tools.sh
	cargo build --release -p tunnel-server -p tunnel-agent -p tunnel-tests --bins
	@target=$${CARGO_TARGET_DIR:-target}; exec $$target/release/demo $(ARGS)

test: tools ## all tests; those that need what this machine lacks are listed at the end
	@tests/run.sh

faults: ## the fault matrix with full clocks, about 11 minutes; ONLY=F06,F14 SEEDS=1 ARGS=--quick (ARGS=--help tells all)
	cargo build --release -p tunnel-server -p tunnel-agent -p tunnel-tests --bin tunnel-server --bin tunnel-agent --bin faults
	@target=$${CARGO_TARGET_DIR:-target}; exec $$target/release/faults $(if $(ONLY),--only $(ONLY)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

soak: ## what takes longer than `make test` allows, with full clocks; HOURS=8 for about that long (1 is the default)
	cargo build --workspace --bins
	cargo test -p tunnel-tests --test scenarios -- --ignored --nocapture
	CULVERT_TEST_BULK_GIB=10 cargo test -p tunnel-tests --test scenarios -- bulk::
	CULVERT_TEST_CROWD=10000 cargo test -p tunnel-tests --test scenarios -- crowds:: --test-threads=1
	CULVERT_FUZZ_EXECUTIONS=$$(($(HOURS) * 20000000)) cargo test -p tunnel-tests --test scenarios -- fuzz_
	CULVERT_FUZZ_EXECUTIONS=$$(($(HOURS) * 20000000)) cargo test -p tunnel-server --lib -- fuzz
	$(MAKE) faults

bench: ## the benchmark, about 13 minutes; CASE=1,8 ROUNDS=5 RATHOLE=path BINARIES=DIR; FULL=1 takes longer and writes docs/benchmarks.md
	cargo build --release -p tunnel-server -p tunnel-agent -p tunnel-tests --bin tunnel-server --bin tunnel-agent --bin bench
	@set -e; target=$${CARGO_TARGET_DIR:-target}; binaries=$${BINARIES:-$(if $(FULL),$$(deploy/static.sh))}; \
	  exec env $${binaries:+CULVERT_BIN_DIR="$$binaries"} $$target/release/bench run --rounds $(ROUNDS) $(if $(CASE),--case $(CASE)) \
	  $(if $(FULL),--full --docs docs/benchmarks.md) $(if $(RATHOLE),--rathole $(RATHOLE)) $(ARGS)

bench-compare: ## what became worse since an older target/bench/report.json; BASE=file, exits 1 when anything did
	cargo build --release -p tunnel-tests --bin bench
	@target=$${CARGO_TARGET_DIR:-target}; exec $$target/release/bench compare $(BASE)

bench-guards: ## instructions of framing, routes and policy, by valgrind; what a busy machine does not change
	cargo build --release -p tunnel-tests --bin bench
	@target=$${CARGO_TARGET_DIR:-target}; exec $$target/release/bench guards

lint: ## formatting, clippy, documentation, and what each crate may depend on
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --locked
	cargo check -p tunnel-proto --no-default-features --locked
	! cargo tree -p tunnel-proto --no-default-features -e normal --prefix none | grep -w tokio

audit: ## licences, advisories and banned crates (cargo-deny)
	@if command -v cargo-deny >/dev/null; then cargo deny check; else echo "skipped: cargo-deny is not installed"; fi

docs: ## writes the configuration reference anew from the code
	cargo run -p tunnel-tests --bin reference

static: ## the two binaries without shared libraries, small: what images and packages carry (about 12 minutes of one core)
	@deploy/static.sh

images: ## container images of both, with docker, buildah or podman; PREFIX=registry.example.com/ TAG=0.1.0 BINARIES=DIR
	@deploy/images.sh

images-test: static ## builds the images and runs them with podman: hardened, healthy, an enrollment and a request
	@tests/images.sh "$$(deploy/static.sh 2>/dev/null)" || { code=$$?; [ $$code -eq 77 ] || exit $$code; }

manifests: tools ## renders deploy/manifests/install.yaml
	@deploy/manifests.sh

tools: ## the real programs that tests run against: Prometheus, node_exporter, kubectl, curl, dig, ip, nft
	@tests/tools.sh
