//! Sends arbitrary bytes as a DNS query. `tests/scenarios/dns/hostile.rs` runs the same check with
//! a seeded generator.

#![no_main]

libfuzzer_sys::fuzz_target!(|message: &[u8]| {
    tunnel_tests::dns::keeps_the_rules(message).expect("the embedded DNS breaks a rule");
});
