//! Configurations: what PyTorch 2.15 was seen to accept and to refuse, in its words.

use memtrace_caching::Settings;
use memtrace_caching::settings::{Backend, Reserve};
use proptest::prelude::*;

const OUT_OF_BOUNDS: &str = "Index out of bounds in ConfigTokenizer";

/// Configuration, and what PyTorch says.
const REFUSED: &[(&str, &str)] = &[
    ("foo:1", "Unrecognized key 'foo' in Accelerator allocator config."),
    ("foo", "Unrecognized key 'foo' in Accelerator allocator config."),
    (",", "Unrecognized key ',' in Accelerator allocator config."),
    ("max_split_size_mb:64,,", "Unrecognized key ',' in Accelerator allocator config."),
    (
        "max_split_size_mb=20",
        "Unrecognized key 'max_split_size_mb=20' in Accelerator allocator config.",
    ),
    (
        "max_split_size_mb:64 expandable_segments:True",
        "Unrecognized key 'True' in Accelerator allocator config.",
    ),
    ("max_split_size_mb:19", "CachingAllocator option max_split_size_mb too small, must be >= 20"),
    (
        "max_split_size_mb:0x20",
        "CachingAllocator option max_split_size_mb too small, must be >= 20",
    ),
    (
        "max_split_size_mb:40,large_segment_size_mb:64",
        "CachingAllocator option max_split_size_mb too small, must be >= 64",
    ),
    (
        "max_non_split_rounding_mb:1",
        "CachingAllocator option max_non_split_rounding_mb too small, must be >= 20",
    ),
    ("max_split_size_mb:abc", "stoull"),
    ("max_split_size_mb::64", "stoull"),
    ("max_split_size_mb:99999999999999999999", "stoull"),
    ("max_split_size_mb", OUT_OF_BOUNDS),
    ("max_split_size_mb:", OUT_OF_BOUNDS),
    ("large_segment_size_mb:10", "CachingAllocator option large_segment_size_mb must be > 10 MB"),
    (
        "foo:1,large_segment_size_mb:5",
        "CachingAllocator option large_segment_size_mb must be > 10 MB",
    ),
    (
        "expandable_segments:true",
        "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'true'",
    ),
    (
        "max_split_size_mb:64,expandable_segments:[True]",
        "Expected 'True' or 'False' at index 6 in ConfigTokenizer but got '['",
    ),
    (
        "garbage_collection_threshold:1",
        "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
    ),
    (
        "garbage_collection_threshold:nan",
        "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
    ),
    ("garbage_collection_threshold:abc", "stod"),
    (
        "per_process_memory_fraction:1.1",
        "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
    ),
    ("roundup_power2_divisions:3", "For roundups, the divisions has to be power of 2"),
    ("roundup_power2_divisions:[3:1]", "For roundups, the intervals have to be power of 2"),
    (
        "roundup_power2_divisions:[256:3]",
        "For roundups, the divisions has to be power of 2 or 0 to disable roundup",
    ),
    ("roundup_power2_divisions:[256:1", OUT_OF_BOUNDS),
    ("roundup_power2_divisions:[256]", OUT_OF_BOUNDS),
    ("roundup_power2_divisions:[256:]", "stoull"),
    ("roundup_power2_divisions:[1:2:3:4]", "For roundups, the intervals have to be power of 2"),
    ("roundup_power2_divisions:256:1", "Unrecognized key '1' in Accelerator allocator config."),
    ("backend:foo", "Unknown allocator backend, options are native and cudaMallocAsync"),
    ("pinned_num_register_threads:10", "Number of register threads has to be power of 2, got 10"),
    (
        "pinned_num_register_threads:256",
        "Number of register threads should be less than or equal to 128, got 256",
    ),
    ("pinned_reserve_segment_size_mb:0", "Pinned reserve segment size has to be greater than 0"),
    (
        "pinned_free_catch_all:1",
        "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got '1'",
    ),
    ("expandable_segments_reserve:", OUT_OF_BOUNDS),
    ("expandable_segments_reserve_by_class:[a]", OUT_OF_BOUNDS),
];

#[test]
fn what_pytorch_refuses_is_refused_in_its_words() {
    for (conf, words) in REFUSED {
        match Settings::parse(conf) {
            Ok(parsed) => panic!("{conf} is refused by PyTorch, not read as {parsed:?}"),
            Err(error) => {
                assert_eq!(error.pytorch, *words, "{conf}");
                let bare = ["stoull", "stod", OUT_OF_BOUNDS].contains(words);
                assert_eq!(error.about.is_some(), bare, "{conf}: {error}");
            }
        }
    }
}

#[test]
fn what_pytorch_accepts_is_accepted() {
    for conf in [
        "",
        "max_split_size_mb:64,",
        "max_split_size_mb,64",
        "max_split_size_mb[64",
        "max_split_size_mb:64]",
        "max_split_size_mb:6 4",
        "max_split_size_mb:+32",
        "max_split_size_mb:20.5",
        " max_split_size_mb : 64 , expandable_segments : True ",
        "max_split_size_mb:12,large_segment_size_mb:11",
        "roundup_power2_divisions:[]",
        "roundup_power2_divisions:[1,2]",
        "roundup_power2_divisions:[256:1,512:2,]",
        "roundup_power2_divisions:[65536:2]",
        "roundup_power2_divisions:[1:2],expandable_segments:True",
        "garbage_collection_threshold:0.5x",
        "per_process_memory_fraction:0",
        "expandable_segments_reserve_by_class:[a:0.5,b:40G],expandable_segments:True",
        "backend:native",
    ] {
        Settings::parse(conf).unwrap_or_else(|e| panic!("{conf}: {e}"));
    }
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in r"(max_split_size_mb|large_segment_size_mb|roundup_power2_divisions|expandable_segments_reserve_by_class|[a-z\[\]:,>0-9. -]){0,12}") {
        if let Err(error) = Settings::parse(&text) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn no_list_makes_it_panic(list in r"[\[\]:,>0-9a]{0,16}") {
        let _ = Settings::parse(&format!("roundup_power2_divisions:{list}"));
        let _ = Settings::parse(&format!("expandable_segments_reserve_by_class:[{list}"));
    }
}

fn read(conf: &str) -> Settings {
    Settings::parse(conf).expect("valid").settings
}

#[test]
fn values() {
    let s = read("max_split_size_mb:-1,max_non_split_rounding_mb:30,large_segment_size_mb:12abc");
    assert_eq!(s.max_non_split_rounding, 30 << 20);
    assert_eq!(s.large_segment, 12 << 20);
    assert_eq!(s.max_split_size as i64, -1 << 20);
    let s = read(
        "garbage_collection_threshold:.6,per_process_memory_fraction:0.5x,throw_on_cudamalloc_oom:True",
    );
    assert_eq!(
        (s.garbage_collection_threshold, s.memory_fraction, s.throw_on_oom),
        (0.6, 0.5, true)
    );
    let s = read("expandable_segments:True,expandable_segments_reserve:40G");
    assert!(s.expandable_segments);
    assert_eq!(s.reserve, Some(Reserve::Bytes(40 << 30)));
    assert_eq!(read("expandable_segments_reserve:0.5").reserve, Some(Reserve::Fraction(0.5)));
    assert_eq!(read("backend:cudaMallocAsync").backend, Backend::CudaMallocAsync);
}

/// What PyTorch says of itself in `allocator_settings`.
#[test]
fn divisions_are_pytorchs() {
    for (value, divisions) in [
        ("[4:2,16:8,>:1]", [2, 2, 2, 0, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("[>:8]", [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]),
        ("[>:8,256:1]", [1, 1, 1, 1, 1, 1, 1, 1, 1, 8, 8, 8, 8, 8, 8, 8]),
        ("[4:2,>:1,16:8]", [2, 2, 2, 1, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("[64:2,1:4]", [4, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("[65536:2]", [2; 16]),
        ("[1,2]", [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("[256:1,512:2,]", [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0]),
        ("8,roundup_power2_divisions:[4:2]", [2, 2, 2, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]),
        ("[]", [0; 16]),
    ] {
        let conf = format!("roundup_power2_divisions:{value}");
        assert_eq!(read(&conf).roundup_power2_divisions, divisions, "{conf}");
    }
}

#[test]
fn keys_that_change_nothing_say_so() {
    let parsed = Settings::parse("pinned_num_register_threads:8,release_lock_on_cudamalloc:True")
        .expect("valid");
    assert_eq!(parsed.settings, Settings::default());
    assert_eq!(
        parsed.notes,
        [
            "pinned_num_register_threads changes nothing here: it is about host memory",
            "release_lock_on_cudamalloc changes nothing here: it moves a lock, not memory",
        ]
    );
    for value in ["0", "abc", "0.5x", "nan", "inf", "100M", "0G", "40GB", "-4G"] {
        let parsed =
            Settings::parse(&format!("expandable_segments_reserve:{value}")).expect("ignored");
        assert!(
            parsed.notes[0].contains(&format!("reserve value '{value}'")),
            "{:?}",
            parsed.notes
        );
    }
}

#[test]
fn what_is_set_under_way_forgets_sizes_and_keeps_the_rest() {
    let mut settings = read(
        "max_split_size_mb:64,max_non_split_rounding_mb:40,roundup_power2_divisions:4,garbage_collection_threshold:0.5,\
         large_segment_size_mb:32,throw_on_cudamalloc_oom:True,expandable_segments:True",
    );
    let kept =
        read("large_segment_size_mb:32,throw_on_cudamalloc_oom:True,expandable_segments:True");
    settings.change("pinned_use_background_threads:True").expect("valid");
    assert_eq!(settings, kept);
    // What is before a mistake counts.
    for (conf, divisions) in
        [("roundup_power2_divisions:2,nonsense:1", 2), ("nonsense:1,roundup_power2_divisions:2", 0)]
    {
        settings.change(conf).expect_err("nonsense");
        assert_eq!(
            settings,
            Settings { roundup_power2_divisions: [divisions; 16], ..kept.clone() }
        );
    }
}
