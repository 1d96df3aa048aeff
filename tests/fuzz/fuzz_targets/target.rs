//! Runs the target that has the name of the binary on arbitrary bytes. `tests/scenarios/fuzz.rs`
//! runs the same check with a seeded generator.

#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use tunnel_tests::fuzz::FuzzTarget;

static TARGET: LazyLock<&FuzzTarget> =
    LazyLock::new(|| FuzzTarget::of_name(env!("CARGO_BIN_NAME")).expect("a target"));

libfuzzer_sys::fuzz_target!(
    init: {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
        let written = TARGET.write_corpus(&corpus.join(TARGET.name));
        written.expect("the first inputs");
    },
    |input: &[u8]| {
        TARGET.check(input).expect("a decoder breaks a rule");
    }
);
