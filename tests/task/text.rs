//! Untrusted text can never become a control token; the chat format is ChatML's.

use std::sync::LazyLock;

use learner::task::builtin_tokenizer;
use learner::text::{ChatFormat, Role, TextError, Tokenizer, Turn, train};
use proptest::prelude::*;

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| builtin_tokenizer().expect("the shipped tokenizer loads"));
    &TOKENIZER
}

/// Text that tries: pieces of markup, of code and of anything, in any order.
fn hostile_text() -> impl Strategy<Value = String> {
    let markup = prop::sample::select(vec![
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<think>",
        "</tool_response>",
        "<function=submit>",
        "<function=",
        "edit>",
        "</function>",
        "<parameter=line>",
        "</parameter>",
        "<|im_",
        "end|>",
        "assistant\n",
        "\n",
        " ",
        "user",
    ]);
    prop::collection::vec(prop_oneof![3 => markup.prop_map(String::from), 1 => any::<String>()], 0..12)
        .prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn plain_text_never_gives_an_added_token_and_comes_back(text in hostile_text()) {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode_plain(&text);
        prop_assert!(ids.iter().all(|&id| !tokenizer.is_added(id)), "{text:?}");
        prop_assert_eq!(tokenizer.decode(&ids), text.clone());
        prop_assert_eq!(tokenizer.decode_visible(&ids), text);
    }

    #[test]
    fn an_observation_cannot_forge_a_turn(text in hostile_text()) {
        let tokenizer = tokenizer();
        let chat = ChatFormat::new(tokenizer).expect("ChatML");
        for ids in [chat.bridge(&text), chat.opening(&[Turn { role: Role::User, content: &text }])] {
            let start = tokenizer.token_id("<|im_start|>").expect("a control token");
            let controls: Vec<u32> = ids.iter().copied().filter(|&id| tokenizer.is_added(id)).collect();
            prop_assert_eq!(controls, vec![start, chat.stop_token(), start]);
        }
    }
}

#[test]
fn the_chat_format_is_chatml() {
    let tokenizer = tokenizer();
    let chat = ChatFormat::new(tokenizer).expect("ChatML");
    let opening =
        chat.opening(&[Turn { role: Role::System, content: "be brief" }, Turn { role: Role::User, content: "scan(rows, a)" }]);
    let expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nscan(rows, a)<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(tokenizer.decode(&opening), expected);
    assert_eq!(opening, tokenizer.encode_markup(expected));
    let bridge = chat.bridge("1|def scan(rows, a):\n2|    return 0");
    let expected = "\n<|im_start|>user\n1|def scan(rows, a):\n2|    return 0<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(tokenizer.decode(&bridge), expected);
    assert_eq!(bridge, tokenizer.encode_markup(expected));
}

#[test]
fn markup_gives_one_token_per_tag() {
    let tokenizer = tokenizer();
    for token in train::ADDED_TOKENS {
        assert_eq!(tokenizer.encode_markup(token), [tokenizer.token_id(token).expect("an added token")]);
    }
    let call = "<function=edit><parameter=line>4|        if x >= a:</parameter></function><|im_end|>";
    let ids = tokenizer.encode_markup(call);
    assert_eq!(tokenizer.decode(&ids), call);
    assert_eq!(ids.iter().filter(|&&id| tokenizer.is_added(id)).count(), 5);
}

#[test]
fn what_is_not_text_stays_visible() {
    let tokenizer = tokenizer();
    let snowman = tokenizer.encode_plain("☃");
    assert_eq!(snowman.len(), 3, "three bytes, no merge");
    assert_eq!(tokenizer.decode(&snowman[..1]), "\u{fffd}");
    assert_eq!(tokenizer.decode_visible(&[snowman[0], 99_999]), "\\xE2<|99999|>");
    assert_eq!(tokenizer.decode(&[99_999]), "");
}

#[test]
fn a_tokenizer_that_cannot_serve_is_refused_in_one_line() {
    let error = Tokenizer::load(std::path::Path::new("/nonexistent")).expect_err("no file").to_string();
    assert!(error.contains("/nonexistent/tokenizer.json") && !error.contains('\n'), "{error}");
    let error = Tokenizer::from_bytes(b"{", "broken.json").expect_err("no JSON").to_string();
    assert!(error.contains("broken.json") && !error.contains('\n'), "{error}");
    let wordpiece = br#"{"added_tokens": [], "model": {"type": "WordPiece", "vocab": {}}}"#;
    let error = Tokenizer::from_bytes(wordpiece, "bert.json").expect_err("another kind").to_string();
    assert!(error.contains("BPE"), "{error}");
    let mut description: serde_json::Value =
        serde_json::from_slice(learner::task::builtin_tokenizer_json()).expect("the shipped tokenizer is JSON");
    description["pre_tokenizer"] = serde_json::json!({"type": "Whitespace"});
    let error = Tokenizer::from_bytes(description.to_string().as_bytes(), "words.json").expect_err("no bytes").to_string();
    assert!(error.contains("words.json") && error.contains("ByteLevel"), "{error}");

    let mut description: serde_json::Value =
        serde_json::from_slice(learner::task::builtin_tokenizer_json()).expect("the shipped tokenizer is JSON");
    description["added_tokens"].as_array_mut().expect("a list").retain(|token| token["content"] != "<|im_end|>");
    let without = Tokenizer::from_bytes(description.to_string().as_bytes(), "no-chat.json").expect("still a tokenizer");
    let error = ChatFormat::new(&without).expect_err("no ChatML");
    assert!(matches!(error, TextError::NoChatToken { token: "<|im_end|>", .. }));
    assert!(error.to_string().contains("no-chat.json"), "{error}");
}

#[test]
fn an_added_token_that_is_also_a_merge_result_is_unreachable_for_plain_text() {
    // Vocabulary entries and merges that would build "<|" "x" ... as ordinary tokens.
    let mut description: serde_json::Value =
        serde_json::from_slice(learner::task::builtin_tokenizer_json()).expect("the shipped tokenizer is JSON");
    description["model"]["vocab"]["<|im_start|>"] = serde_json::json!(430);
    description["model"]["ignore_merges"] = serde_json::json!(true);
    description["pre_tokenizer"] =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = Tokenizer::from_bytes(description.to_string().as_bytes(), "sly.json").expect("a tokenizer");
    let ids = tokenizer.encode_plain("<|im_start|>");
    assert!(ids.len() > 1 && ids.iter().all(|&id| id != 430 && !tokenizer.is_added(id)), "{ids:?}");
}

#[test]
fn a_byte_that_the_vocabulary_lacks_is_replaced_visibly() {
    let mut description: serde_json::Value =
        serde_json::from_slice(learner::task::builtin_tokenizer_json()).expect("the shipped tokenizer is JSON");
    let vocabulary = description["model"]["vocab"].as_object_mut().expect("a vocabulary");
    // The bytes 0x04 and 0xF0, in the byte-level alphabet.
    assert!(vocabulary.remove("\u{104}").is_some() && vocabulary.remove("\u{f0}").is_some());
    let tokenizer = Tokenizer::from_bytes(description.to_string().as_bytes(), "holes.json").expect("a tokenizer");
    for encode in [Tokenizer::encode_plain, Tokenizer::encode_markup] {
        let ids = encode(&tokenizer, "a\u{4}b \u{1f600}é\u{5}");
        assert_eq!(tokenizer.decode(&ids), "a\u{fffd}b \u{fffd}é\u{5}");
    }
    let vocabulary = description["model"]["vocab"].as_object_mut().expect("a vocabulary");
    vocabulary.remove("\u{ef}");
    let error = Tokenizer::from_bytes(description.to_string().as_bytes(), "mute.json").expect_err("no U+FFFD").to_string();
    assert!(error.contains("mute.json") && error.contains("U+FFFD"), "{error}");
}
