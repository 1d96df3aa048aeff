//! A parser of hosts files that follows the documentation of CoreDNS's hosts plugin. A line has an
//! address and names, `#` begins a comment, names compare without case, and lines that do not begin
//! with an address are skipped.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Returns the names in lower case with all their addresses, in the order of the file.
pub(super) fn parse(text: &str) -> BTreeMap<String, Vec<IpAddr>> {
    let mut names: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for line in text.split('\n') {
        let content = line.split('#').next().unwrap_or_default();
        let mut words = content
            .split([' ', '\t', '\r', '\x0b', '\x0c'])
            .filter(|word| !word.is_empty());
        // An IPv6 address may include a zone, which is not part of the answer.
        let address = words
            .next()
            .and_then(|word| word.split('%').next())
            .and_then(|word| word.parse().ok());
        let Some(address) = address else {
            continue;
        };
        for name in words {
            let name = name.trim_end_matches('.').to_lowercase();
            names.entry(name).or_default().push(address);
        }
    }
    names
}

#[test]
fn hosts_files_are_read_as_documented() {
    let text = "10.0.0.1\tA.example a # b\n# 10.0.0.2 c\nnot-an-address d\n\nfe80::1%eth0  e.  \n10.0.0.3 a\r";
    let found = parse(text);
    let names: Vec<_> = found
        .iter()
        .map(|(name, addresses)| (name.as_str(), addresses.len()))
        .collect();
    assert_eq!(names, [("a", 2), ("a.example", 1), ("e", 1)]);
}
