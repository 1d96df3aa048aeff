//! Parses rules as the tools print them, and rules that are not yurt-tunnel's.

use super::*;

#[test]
fn words_are_unquoted_as_iptables_save_quotes_them() {
    let rule = r#"OUTPUT -p tcp -m comment --comment "a \"b\" \\ \'c\' $(d)" --comment "" -j X"#;
    let expected = [
        "OUTPUT",
        "-p",
        "tcp",
        "-m",
        "comment",
        "--comment",
        r#"a "b" \ 'c' $(d)"#,
        "--comment",
        "",
        "-j",
        "X",
    ];
    assert_eq!(split_rule(rule), expected);
}

#[test]
fn only_the_names_of_yurt_tunnel_are_its_chains() {
    for name in ["TUNNEL-PORT", "TUNNEL-PORT-10250"] {
        assert_eq!(TunnelChain::parse(name).unwrap().to_string(), name);
    }
    for name in [
        "TUNNEL-PORTS",
        "TUNNEL-PORT-",
        "TUNNEL-PORT-0",
        "TUNNEL-PORT-09100",
        "TUNNEL-PORT-70000",
        "TUNNEL-PORT-1;reboot",
        "MY-TUNNEL-PORT",
    ] {
        assert_eq!(TunnelChain::parse(name), None, "{name}");
    }
}

#[test]
fn rule_of_another_program_that_leads_to_the_chains_is_refused() {
    for rule in [
        "-A PREROUTING -p tcp -j TUNNEL-PORT",
        "-A OUTPUT -s 10.0.0.1/32 -p tcp -j TUNNEL-PORT",
        "-A OUTPUT -p tcp -j TUNNEL-PORT --modprobe=/tmp/x",
        "-A MINE -j TUNNEL-PORT-10250",
    ] {
        let text = format!("*nat\n:TUNNEL-PORT - [0:0]\n{rule}\nCOMMIT\n");
        let error = parse(&text).unwrap_err();
        assert!(error.to_string().contains(rule), "{error}");
    }
    let elsewhere = "*filter\n:TUNNEL-PORT - [0:0]\n-A INPUT -j TUNNEL-PORT\nCOMMIT\n";
    assert!(parse(elsewhere).unwrap().is_empty());
}
