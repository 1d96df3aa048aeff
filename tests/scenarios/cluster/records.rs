//! The ConfigMap of the records: its text, the changes that it follows, and the failures that it
//! survives.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::{Families, Kind, Node, Objects, cloud, edge};
use tunnel_tests::eventually::{eventually, scaled};

use super::hosts_file::parse;
use super::{ClusterEnv, FIRST, GUIDE_RECORDS, REACTION};

on_both!(
    dns_1_records_are_those_of_the_guide_byte_for_byte,
    dns_5_a_flipped_label_and_a_changed_address_are_followed,
    dns_6_deleting_a_node_leaves_those_whose_names_end_alike,
    dns_7_the_controller_recovers_from_objects_that_are_missing_or_empty,
    f22_a_deleted_map_is_made_again_and_foreign_edits_are_repaired_or_preserved,
    t13_hostile_addresses_of_nodes_make_no_foreign_record,
    t14_records_that_do_not_fit_are_not_written_and_the_server_goes_on,
    no_record_is_written_without_the_address_of_the_service,
);

async fn dns_1_records_are_those_of_the_guide_byte_for_byte(cluster_env: ClusterEnv) -> Result<()> {
    cluster_env.guide().await?;
    let _server = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    let map = cluster_env.objects().records_map().await?;
    ensure!(
        map["data"] == json!({ "tunnel-nodes": GUIDE_RECORDS }),
        "{map}"
    );
    ensure!(map["binaryData"].is_null(), "{map}");
    Ok(())
}

async fn dns_5_a_flipped_label_and_a_changed_address_are_followed(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let _server = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    let objects = cluster_env.objects();
    objects.set_edge("worker-1", false).await?;
    cluster_env
        .wait_for_records(
            "worker-1 in the cloud",
            REACTION,
            "192.168.33.220\tmaster-1\n192.168.33.221\tworker-1",
        )
        .await;
    objects.set_edge("worker-1", true).await?;
    cluster_env
        .wait_for_records("worker-1 at the edge", REACTION, GUIDE_RECORDS)
        .await;
    objects
        .set_addresses(
            "master-1",
            json!([{ "type": "InternalIP", "address": "192.168.33.230" }]),
        )
        .await?;
    cluster_env
        .wait_for_records(
            "the new address",
            REACTION,
            "10.106.217.16\tworker-1\n192.168.33.230\tmaster-1",
        )
        .await;
    objects
        .set_addresses(
            "master-1",
            json!([{ "type": "ExternalIP", "address": "203.0.113.5" }]),
        )
        .await?;
    cluster_env
        .wait_for_records(
            "the outer address",
            REACTION,
            "10.106.217.16\tworker-1\n203.0.113.5\tmaster-1",
        )
        .await;
    Ok(())
}

async fn dns_6_deleting_a_node_leaves_those_whose_names_end_alike(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env
        .objects()
        .create_service(|service| service["spec"]["clusterIP"] = super::GUIDE_IP.into())
        .await?;
    for node in ["1", "worker-1", "xworker-1"] {
        cluster_env.objects().add(&edge(node)).await?;
    }
    let _server = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records(
            "all three",
            FIRST,
            "10.106.217.16\t1\n10.106.217.16\tworker-1\n10.106.217.16\txworker-1",
        )
        .await;
    cluster_env.objects().remove("1").await?;
    cluster_env
        .wait_for_records(
            "the other two",
            REACTION,
            "10.106.217.16\tworker-1\n10.106.217.16\txworker-1",
        )
        .await;
    cluster_env.objects().remove("worker-1").await?;
    cluster_env
        .wait_for_records("the last", REACTION, "10.106.217.16\txworker-1")
        .await;
    Ok(())
}

async fn dns_7_the_controller_recovers_from_objects_that_are_missing_or_empty(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let labels = json!({ "metadata": { "labels": { "mine": "x" } } });
    let admin = cluster_env.cluster.admin();
    let empty = admin.merge(&Objects::records_path(), &labels).await?;
    ensure!(empty["data"].is_null(), "{empty}");
    cluster_env.guide().await?;
    let server = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records("records in a map without data", FIRST, GUIDE_RECORDS)
        .await;
    let map = cluster_env.objects().records_map().await?;
    ensure!(map["metadata"]["labels"]["mine"] == "x", "{map}");

    let service = Objects::path("services", "x-tunnel-server-internal-svc");
    cluster_env.cluster.admin().delete(&service).await?;
    cluster_env
        .objects()
        .create_service(|service| service["spec"]["clusterIP"] = "10.106.217.99".into())
        .await?;
    cluster_env
        .wait_for_records(
            "the new Service's address",
            REACTION,
            "10.106.217.99\tworker-1\n192.168.33.220\tmaster-1",
        )
        .await;

    let endpoint = server
        .address(tunnel_tests::process::Listener::Https)
        .port();
    cluster_env
        .objects()
        .set_ports(&[("https-proxy-ports", "9100")])
        .await?;
    cluster_env
        .wait_for_ports(
            "the extra port",
            &[BASE[0], BASE[1], ("dnat-9100", 9100, "TCP", endpoint)],
        )
        .await;
    cluster_env.objects().remove_ports().await?;
    cluster_env.wait_for_ports("no extra port", &BASE).await;
    cluster_env
        .objects()
        .set_ports(&[("https-proxy-ports", "9100")])
        .await?;
    cluster_env
        .wait_for_ports(
            "the extra port again",
            &[BASE[0], BASE[1], ("dnat-9100", 9100, "TCP", endpoint)],
        )
        .await;
    Ok(())
}

/// The Service's own ports, which the server never changes.
pub(super) const BASE: [(&str, u16, &str, u16); 2] = [
    ("http", 10255, "TCP", 10264),
    ("https", 10250, "TCP", 10263),
];

async fn f22_a_deleted_map_is_made_again_and_foreign_edits_are_repaired_or_preserved(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.cluster.allow_creation().await?;
    cluster_env.guide().await?;
    let _server = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    let admin = cluster_env.cluster.admin();
    admin.delete(&Objects::records_path()).await?;
    cluster_env
        .wait_for_records("the map again", Duration::from_secs(10), GUIDE_RECORDS)
        .await;
    let edit = json!({ "data": { "tunnel-nodes": "10.0.0.1\tsomebody-else", "theirs": "1" }, "metadata": { "annotations": { "note": "x" } } });
    admin.merge(&Objects::records_path(), &edit).await?;
    cluster_env
        .wait_for_records(
            "the repaired records",
            Duration::from_secs(10),
            GUIDE_RECORDS,
        )
        .await;
    let map = cluster_env.objects().records_map().await?;
    ensure!(
        map["data"]["theirs"] == "1" && map["metadata"]["annotations"]["note"] == "x",
        "{map}"
    );
    admin
        .merge(
            &Objects::records_path(),
            &json!({ "data": { "tunnel-nodes": null } }),
        )
        .await?;
    cluster_env
        .wait_for_records("the key again", Duration::from_secs(10), GUIDE_RECORDS)
        .await;
    let map = cluster_env.objects().records_map().await?;
    ensure!(map["data"]["theirs"] == "1", "{map}");
    Ok(())
}

async fn t13_hostile_addresses_of_nodes_make_no_foreign_record(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let long = "a".repeat(254);
    for (number, hostile) in HOSTILE.into_iter().chain([long.as_str()]).enumerate() {
        // The API validates the names of Nodes, but a kubelet may report any address.
        cluster_env
            .objects()
            .add(&edge(&format!("edge-{number}")).addressed("Hostname", hostile))
            .await?;
        cluster_env
            .objects()
            .add(&Node::new(&format!("cloud-{number}")).addressed("InternalIP", hostile))
            .await?;
    }
    let good = cloud("last", "192.168.33.9").addressed("Hostname", "Last.Example");
    cluster_env.objects().add(&good).await?;
    let _server = cluster_env.server("a").await?;
    let records = eventually("the last node's record", FIRST, async || {
        let records = cluster_env.objects().records().await?;
        ensure!(
            records.contains("\tlast\n") || records.ends_with("\tlast"),
            "{records}"
        );
        Ok(records)
    })
    .await;
    let found = parse(&records);
    let mut expected: Vec<String> = (0..=HOSTILE.len())
        .map(|number| format!("edge-{number}"))
        .collect();
    expected.extend(["last", "last.example", "master-1", "worker-1"].map(str::to_owned));
    // One of the hostile strings is a valid address. The server refuses names in foreign domains,
    // even if they are well-formed.
    expected.push("cloud-11".to_owned());
    expected.sort();
    let names: Vec<_> = found.keys().cloned().collect();
    ensure!(
        names == expected,
        "names {names:?}, not {expected:?}, in\n{records}"
    );
    ensure!(
        found["worker-1"] == ["10.106.217.16".parse::<std::net::IpAddr>()?],
        "{records}"
    );
    ensure!(
        found["master-1"] == ["192.168.33.220".parse::<std::net::IpAddr>()?],
        "{records}"
    );
    ensure!(
        records
            .lines()
            .all(|line| line.matches('\t').count() == 1 && !line.contains([' ', '#', '\r', '\0'])),
        "{records}"
    );
    Ok(())
}

/// Strings that a hostile kubelet might report as its address.
const HOSTILE: [&str; 14] = [
    "x 10.0.0.1 kubernetes.default",
    "x\n10.0.0.1\tmaster-1",
    "x\t10.0.0.1",
    "x#y",
    "x\0y",
    "bücher.example",
    "localhost",
    "localhost.",
    "*.example",
    "-x",
    "kubernetes.default.svc.cluster.local",
    "10.0.0.1",
    "Upper.Example",
    "dotted.example.",
];

async fn t14_records_that_do_not_fit_are_not_written_and_the_server_goes_on(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let server = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    let filling = "x".repeat(1024 * 1024 - GUIDE_RECORDS.len());
    let before = cluster_env
        .cluster
        .admin()
        .merge(
            &Objects::records_path(),
            &json!({ "data": { "theirs": filling } }),
        )
        .await?;
    cluster_env.objects().add(&edge("worker-2")).await?;
    let meta = server.address(tunnel_tests::process::Listener::Meta);
    eventually("the alarm", scaled(FIRST), async || {
        let readyz = RawRequest::get("meta", "/readyz?verbose");
        let ready_text = request(meta, &readyz).await?.text();
        ensure!(
            ready_text.contains("bytes") || ready_text.contains("too large"),
            "readyz reports {ready_text}"
        );
        Ok(())
    })
    .await;
    let map = cluster_env.objects().records_map().await?;
    ensure!(
        map["data"]["tunnel-nodes"] == before["data"]["tunnel-nodes"],
        "the old records stay"
    );
    cluster_env
        .cluster
        .admin()
        .merge(
            &Objects::records_path(),
            &json!({ "data": { "theirs": null } }),
        )
        .await?;
    cluster_env
        .wait_for_records(
            "the records that fit",
            Duration::from_secs(10),
            "10.106.217.16\tworker-1\n10.106.217.16\tworker-2\n192.168.33.220\tmaster-1",
        )
        .await;
    Ok(())
}

async fn no_record_is_written_without_the_address_of_the_service(
    cluster_env: ClusterEnv,
) -> Result<()> {
    // The server creates the map after it has listed all objects.
    cluster_env.cluster.allow_creation().await?;
    cluster_env
        .cluster
        .admin()
        .delete(&Objects::records_path())
        .await?;
    cluster_env.objects().add(&edge("worker-1")).await?;
    cluster_env
        .objects()
        .add(&cloud("master-1", "192.168.33.220"))
        .await?;
    let _server = cluster_env.server("a").await?;
    let made = eventually("the empty map", FIRST, async || {
        cluster_env.objects().records_map().await
    })
    .await;
    ensure!(
        made["data"]["tunnel-nodes"]
            .as_str()
            .unwrap_or_default()
            .is_empty(),
        "{made}"
    );
    cluster_env
        .objects()
        .create_service(|service| service["spec"]["clusterIP"] = "None".into())
        .await?;
    let service = Objects::path("services", "x-tunnel-server-internal-svc");
    cluster_env.cluster.admin().delete(&service).await?;
    let map = cluster_env.objects().records_map().await?;
    ensure!(
        map["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"],
        "written without an address: {map}"
    );
    cluster_env
        .objects()
        .create_service(|service| service["spec"]["clusterIP"] = super::GUIDE_IP.into())
        .await?;
    cluster_env
        .wait_for_records("the guide's records", REACTION, GUIDE_RECORDS)
        .await;
    Ok(())
}

mod dual {
    use super::*;

    async fn both_families(kind: Kind) -> Result<()> {
        let Some(cluster_env) = ClusterEnv::with_families(kind, Families::Dual).await? else {
            return Ok(());
        };
        let service = cluster_env
            .objects()
            .create_service(|service| service["spec"]["ipFamilyPolicy"] = "PreferDualStack".into())
            .await?;
        let addresses: Vec<_> = service["spec"]["clusterIPs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|ip| ip.as_str())
            .collect();
        ensure!(addresses.len() == 2, "{service}");
        cluster_env.objects().add(&edge("worker-1")).await?;
        cluster_env
            .objects()
            .add(&cloud("master-1", "192.168.33.220").addressed("InternalIP", "fd00::220"))
            .await?;
        let _server = cluster_env.server("a").await?;
        let mut lines = vec![
            format!("{}\tworker-1", addresses[0]),
            format!("{}\tworker-1", addresses[1]),
        ];
        lines.extend([
            "192.168.33.220\tmaster-1".to_owned(),
            "fd00::220\tmaster-1".to_owned(),
        ]);
        lines.sort();
        cluster_env
            .wait_for_records("a line of each family", FIRST, &lines.join("\n"))
            .await;
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn fake_api_a_node_has_a_record_of_each_family() -> Result<()> {
        both_families(Kind::FakeApiServer).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn real_a_node_has_a_record_of_each_family() -> Result<()> {
        both_families(Kind::Real).await
    }
}
