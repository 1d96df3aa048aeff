use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::SystemTime;

use super::*;
use crate::testing::node_sources;
use tunnel_ca::revocation::OrderAction;
use tunnel_store::data_dir::testing::Scratch;
use tunnel_store::known_nodes::KnownNodes;

fn name(number: usize) -> NodeName {
    format!("edge-{number:06}").parse().unwrap()
}

fn known(scratch: &Scratch, numbers: impl IntoIterator<Item = usize>) -> NodeSources {
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    for number in numbers {
        nodes.record(&name(number), &[]);
    }
    NodeSources::of_files(nodes, Revocations::open(&scratch.0, true).unwrap())
}

/// Reads a list to its end. Returns the names, and the largest size of a page.
fn read(
    sources: &NodeSources,
    mut query: PageQuery,
    mut between: impl FnMut(),
) -> (Vec<String>, usize) {
    let (mut names, mut largest) = (Vec::new(), 0);
    loop {
        let page = sources.page(&query);
        assert!(page.nodes.len() <= query.limit.min(PAGE_MAX));
        largest = largest.max(encoded_bytes(&page));
        names.extend(page.nodes.into_iter().map(|status| status.node));
        let Some(token) = page.r#continue else {
            return (names, largest);
        };
        query = PageQuery::parse(&format!("limit={}&continue={token}", query.limit)).unwrap();
        between();
    }
}

#[test]
fn queries_are_parsed_bounded_and_refused() {
    let query = |after: Option<usize>, limit| {
        let after = after.map(name);
        Ok(PageQuery { after, limit })
    };
    for (text, expected) in [
        ("", query(None, PAGE_DEFAULT)),
        ("limit=7&continue=edge-000003", query(Some(3), 7)),
        ("continue=Edge-000003.&", query(Some(3), PAGE_DEFAULT)),
        ("limit=1000000000", query(None, PAGE_MAX)),
        ("limit=18446744073709551615", query(None, PAGE_MAX)),
        ("limit=18446744073709551616", Err(PageError::Limit)),
        ("limit=1e9", Err(PageError::Limit)),
        ("limit=0", Err(PageError::Limit)),
        ("limit=-1", Err(PageError::Limit)),
        ("limit", Err(PageError::Limit)),
        ("continue=", Err(PageError::Continue)),
        ("continue=%2e%2e", Err(PageError::Continue)),
        ("continue=a_b", Err(PageError::Continue)),
        (
            "limit=1&limit=1",
            Err(PageError::Repeated(RepeatedParameter("limit"))),
        ),
        (
            "continue=a&continue=a",
            Err(PageError::Repeated(RepeatedParameter("continue"))),
        ),
        ("job=a", Err(PageError::Unknown)),
    ] {
        assert_eq!(PageQuery::parse(text), expected, "{text}");
    }
    let long = format!("continue={}", "a".repeat(300));
    assert_eq!(PageQuery::parse(&long), Err(PageError::Continue));
    let query = query(Some(3), 7).unwrap();
    let target = query.target("nodes");
    let parsed = PageQuery::parse(target.strip_prefix("/nodes?").unwrap());
    assert_eq!(parsed, Ok(query));
}

#[test]
fn hundred_thousand_nodes_are_read_in_pages_that_stay_small() {
    let scratch = Scratch::new();
    let sources = known(&scratch, 0..100_000);
    let query = PageQuery {
        after: None,
        limit: usize::MAX,
    };
    let (names, largest) = read(&sources, query, || {});
    assert_eq!(names.len(), 100_000);
    assert!(names.is_sorted());
    assert!(largest < PAGE_MAX_BYTES + 2048, "{largest}");
    assert_eq!(sources.of_node(&name(99_999)).unwrap().node, "edge-099999");
    assert_eq!(sources.of_node(&name(100_000)), None);
}

#[test]
fn page_of_large_nodes_ends_at_its_bytes_and_has_at_least_one() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    let addresses = |node: u16| {
        (0..2000).map(move |number| IpAddr::from([0xfd00, node, 0, 0, 0, 0, 1, number]))
    };
    for number in 0..100 {
        nodes.record(&name(number.into()), &addresses(number).collect::<Vec<_>>());
    }
    let sources = NodeSources::of_files(nodes, Revocations::open(&scratch.0, true).unwrap());
    let one = encoded_bytes(&sources.of_node(&name(0)).unwrap());
    let (names, largest) = read(&sources, PageQuery::default(), || {});
    assert_eq!(names.len(), 100);
    assert!(100 * one > 2 * PAGE_MAX_BYTES, "{one}");
    assert!(largest < PAGE_MAX_BYTES + one + 256, "{largest}");
}

#[test]
fn nodes_that_come_and_go_neither_repeat_nor_hide_others() {
    let scratch = Scratch::new();
    let sources = known(&scratch, (0..100).map(|number| 10 * number));
    let nodes = sources.nodes.clone();
    let mut pages = 0;
    let query = PageQuery {
        after: None,
        limit: 10,
    };
    let (names, _) = read(&sources, query, || {
        // The last node of the page goes, one before it comes, and one at the end.
        nodes.forget(&name(100 * pages + 90));
        nodes.record(&name(100 * pages + 5), &[]);
        nodes.record(&name(10_000 + pages), &[]);
        pages += 1;
    });
    let unique: BTreeSet<&String> = names.iter().collect();
    assert_eq!(unique.len(), names.len(), "none twice");
    for number in 0..100 {
        assert!(unique.contains(&name(10 * number).to_string()), "{number}");
    }
}

#[tokio::test]
async fn list_has_the_nodes_of_all_sources_once() {
    let (sources, _scratch) = node_sources(&["b", "d"], &["a", "b", "e"], &["c", "d", "f"]);
    for limit in [1, 2, 7] {
        let query = PageQuery { after: None, limit };
        let (names, _) = read(&sources, query, || {});
        assert_eq!(names, ["a", "b", "c", "d", "e", "f"], "{limit}");
    }
    let named = ["f", "x", "a"].map(|name| name.parse().unwrap());
    let page = sources.page_of(&named, 10);
    let names: Vec<_> = page.nodes.iter().map(|status| &*status.node).collect();
    assert_eq!(names, ["f", "a"]);
    assert_eq!(page.r#continue, None);
}

#[test]
fn revocations_are_read_in_pages() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let nodes: Vec<_> = (0..25).map(name).collect();
    revocations.order(OrderAction::Revoke, &nodes, SystemTime::UNIX_EPOCH);
    revocations.order(OrderAction::Unrevoke, &nodes[3..4], SystemTime::UNIX_EPOCH);
    let mut query = PageQuery {
        after: None,
        limit: 8,
    };
    let mut read = Vec::new();
    loop {
        let page = revocations_page(&revocations, &query);
        read.extend(
            page.revocations
                .into_iter()
                .map(|revocation| revocation.node),
        );
        let Some(token) = page.r#continue else { break };
        query.after = Some(token.parse().unwrap());
    }
    let expected = nodes.iter().filter(|node| **node != nodes[3]);
    assert!(read.iter().eq(expected), "{read:?}");
}
