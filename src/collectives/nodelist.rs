//! The first host of a Slurm list of hosts: `node[03-07,12],gpu1` starts with `node03`.

/// None if the list is not written as Slurm writes it. Of each bracket the first alternative counts: its first number, or all of it.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find([',', '[', ']']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        let Some(bracketed) = rest[end..].strip_prefix('[') else {
            let ends_well = !rest[end..].starts_with(']');
            let readable = host.chars().all(|character| character.is_ascii_alphanumeric() || "-_.".contains(character));
            return (ends_well && readable && !host.is_empty()).then_some(host);
        };
        let (alternatives, after) = bracketed.split_once(']')?;
        let first = alternatives.split([',', '-']).next().filter(|first| !first.is_empty())?;
        if !alternatives.chars().all(|character| character.is_ascii_digit() || ",-".contains(character)) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::first_host;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("gpu1", Some("gpu1")),
            ("gpu1,gpu2", Some("gpu1")),
            ("node[03-07,12],gpu1", Some("node03")),
            ("node[12,03-07]", Some("node12")),
            ("rack[1-2]node[05-08]", Some("rack1node05")),
            ("node-[001-128].cluster.example.org", Some("node-001.cluster.example.org")),
            ("a100-0[1-3]-ib", Some("a100-01-ib")),
            ("", None),
            ("node[", None),
            ("node[]", None),
            ("node[x]", None),
            ("node]1", None),
            ("node 1", None),
            ("$(reboot)", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list:?}");
        }
    }
}
