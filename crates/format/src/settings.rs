//! The `allocator_settings` of a snapshot, from the variable that the user set.
//!
//! PyTorch lists every setting with its value in force. Memtrace stands outside and reads the same variable
//! with the same grammar (`key:value,…`), so the list is the one PyTorch would give for a configuration that
//! it accepts. A configuration that it rejects never gets as far as a snapshot.

use serde_json::{Map, Value, json};

/// Upper bounds of the size classes that can have rounding divisions, MiB.
const INTERVALS: u32 = 16;
const MIB: i64 = 1 << 20;

/// The settings that `raw` (the value of `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`) stands for, in the
/// order and with the defaults of PyTorch 2.15.
pub fn from_conf(raw: &str) -> Value {
    let mut divisions = [0_u64; INTERVALS as usize];
    let mut found = Map::new();
    for (key, value) in pairs(raw) {
        match key {
            "roundup_power2_divisions" => divisions = parse_divisions(value),
            "max_split_size_mb" => put(&mut found, "max_split_size", mib(value)),
            "pinned_max_round_threshold_mb" => put(&mut found, "max_round_threshold", mib(value)),
            "pinned_max_cached_size_mb" => put(&mut found, "max_cached_size", mib(value)),
            "garbage_collection_threshold" => put(&mut found, key, value.parse::<f64>().ok()),
            "pinned_num_register_threads" => put(&mut found, key, value.parse::<i64>().ok()),
            "expandable_segments" | "graph_capture_record_stream_reuse" => {
                put(&mut found, key, Some(value == "True"));
            }
            "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => {
                put(&mut found, "release_lock_on_cudamalloc", Some(value == "True"));
            }
            "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" => {
                put(&mut found, "pinned_use_cuda_host_register", Some(value == "True"));
            }
            _ => {}
        }
    }
    let by_interval: Map<String, Value> =
        (0..INTERVALS).map(|i| ((1_u32 << i).to_string(), divisions[i as usize].into())).collect();
    let mut settings = json!({
        "PYTORCH_CUDA_ALLOC_CONF": raw,
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": false,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": false,
        "pinned_use_cuda_host_register": false,
        "graph_capture_record_stream_reuse": false,
        "max_round_threshold": -1,
        "max_cached_size": -1,
        "roundup_power2_divisions": by_interval,
    });
    for (key, value) in found {
        settings[key] = value;
    }
    settings
}

/// The words that stand for what holds after `text` was set where `now` held: PyTorch forgets some settings each time, and keeps
/// the others that aren't named (2.6 to 2.15).
pub fn after(now: &str, text: &str) -> String {
    const FORGOTTEN: [&str; 3] =
        ["max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions"];
    let is_kept =
        |key: &str| !FORGOTTEN.contains(&key) && pairs(text).all(|(other, _)| other != key);
    let kept = pairs(now).filter(|(key, _)| is_kept(key));
    let all: Vec<String> =
        kept.chain(pairs(text)).map(|(key, value)| format!("{key}:{value}")).collect();
    all.join(",")
}

fn put(map: &mut Map<String, Value>, key: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        map.insert(key.to_owned(), value.into());
    }
}

fn mib(value: &str) -> Option<i64> {
    value.parse::<i64>().ok()?.checked_mul(MIB)
}

/// Splits at commas outside brackets, then at the first colon.
fn pairs(raw: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut depth = 0_i32;
    raw.split(move |c| {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .filter_map(|pair| pair.trim().split_once(':'))
    .map(|(k, v)| (k.trim(), v.trim()))
}

/// One number for all intervals, or `[MiB:n,…,>:n]`: the first entry also fills the intervals below it, `>`
/// those above the last one named; what nobody named is 0.
fn parse_divisions(value: &str) -> [u64; INTERVALS as usize] {
    let mut out = [0; INTERVALS as usize];
    let Some(list) = value.strip_prefix('[').and_then(|v| v.strip_suffix(']')) else {
        return [value.parse().unwrap_or(0); INTERVALS as usize];
    };
    // `>` before any size leaves the smallest class alone, and the first size named fills what is below it.
    let (mut first, mut next) = (true, 1);
    for (bound, n) in pairs(list) {
        let n: u64 = n.parse().unwrap_or(0);
        if bound == ">" {
            out[next..].fill(n);
            continue;
        }
        let Ok(bound @ 1..) = bound.parse::<u32>() else { continue };
        let at = bound.ilog2().min(INTERVALS - 1) as usize;
        if first {
            out[..at].fill(n);
        }
        out[at] = n;
        (first, next) = (false, at + 1);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_configuration_gives_the_defaults_in_pytorchs_order() {
        let s = from_conf("");
        let keys: Vec<_> = s.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            [
                "PYTORCH_CUDA_ALLOC_CONF",
                "max_split_size",
                "garbage_collection_threshold",
                "expandable_segments",
                "pinned_num_register_threads",
                "release_lock_on_cudamalloc",
                "pinned_use_cuda_host_register",
                "graph_capture_record_stream_reuse",
                "max_round_threshold",
                "max_cached_size",
                "roundup_power2_divisions"
            ]
        );
        assert_eq!(s["max_split_size"], -1);
        assert_eq!(s["roundup_power2_divisions"]["32768"], 0);
    }

    #[test]
    fn values_are_in_bytes_and_booleans() {
        let s = from_conf(
            "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8",
        );
        assert_eq!(s["max_split_size"], 128 << 20);
        assert_eq!(s["expandable_segments"], true);
        assert_eq!(s["garbage_collection_threshold"], 0.8);
    }

    #[test]
    fn divisions_fill_below_the_first_and_above_the_last() {
        let s = from_conf("roundup_power2_divisions:[4:2,16:8,>:1],expandable_segments:True");
        let d = &s["roundup_power2_divisions"];
        assert_eq!(
            [&d["1"], &d["2"], &d["4"], &d["8"], &d["16"], &d["32"], &d["32768"]],
            [2, 2, 2, 0, 8, 1, 1].map(Value::from).each_ref()
        );
        assert_eq!(s["expandable_segments"], true);
        let s = from_conf("roundup_power2_divisions:[>:8,256:1]");
        let d = &s["roundup_power2_divisions"];
        assert_eq!([&d["1"], &d["256"], &d["512"]], [1, 1, 8].map(Value::from).each_ref());
        assert_eq!(from_conf("roundup_power2_divisions:[>:8]")["roundup_power2_divisions"]["1"], 0);
        assert_eq!(from_conf("roundup_power2_divisions:4")["roundup_power2_divisions"]["64"], 4);
    }

    #[test]
    fn what_is_set_later_leaves_some_settings_as_they_are() {
        let first = "expandable_segments:True,roundup_power2_divisions:[256:1,>:2], pinned_num_register_threads:2";
        let then = after(first, "max_split_size_mb:222");
        assert_eq!(
            then,
            "expandable_segments:True,pinned_num_register_threads:2,max_split_size_mb:222"
        );
        let last = after(&then, "expandable_segments:False");
        assert_eq!(last, "pinned_num_register_threads:2,expandable_segments:False");
        assert_eq!(after("", ""), "");
    }

    #[test]
    fn garbage_is_no_reason_to_panic() {
        for raw in [
            ":",
            ",,",
            "[",
            "]]:[",
            "roundup_power2_divisions:[>:",
            "a:b:c",
            "max_split_size_mb:9e9",
        ] {
            assert_eq!(from_conf(raw)["PYTORCH_CUDA_ALLOC_CONF"], raw);
        }
    }
}
