//! What ships with the quick start is what the generator makes.

use learner::task::{builtin, builtin_tokenizer, builtin_tokenizer_json, make_builtin, make_builtin_tokenizer, render_tasks};
use learner::text::ChatFormat;

#[test]
fn pools_and_tokenizer_are_remade_byte_for_byte() {
    let made = make_builtin().expect("the generator has that many tasks");
    assert!(render_tasks(&made.train) == include_str!("../../recipes/quickstart/train.jsonl"), "train.jsonl is not what is made");
    assert!(render_tasks(&made.held_out) == include_str!("../../recipes/quickstart/held_out.jsonl"), "held_out.jsonl differs");
    for _ in 0..2 {
        let tokenizer = make_builtin_tokenizer(&made.train).expect("training works");
        assert!(tokenizer == builtin_tokenizer_json(), "tokenizer.json is not what training gives");
    }
    assert!(builtin().expect("the shipped pools are well formed") == made);
}

#[test]
fn every_word_of_the_small_family_is_one_token_and_lines_copy_token_by_token() {
    let tokenizer = builtin_tokenizer().expect("the shipped tokenizer loads");
    assert!((400..=512).contains(&tokenizer.vocabulary_size()), "{}", tokenizer.vocabulary_size());
    ChatFormat::new(&tokenizer).expect("the shipped tokenizer speaks ChatML");
    let pools = builtin().expect("the shipped pools are well formed");
    for task in pools.train.iter().chain(&pools.held_out).take(500) {
        let source = &task.files["solution.py"];
        let words = |text: &str| text.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| !word.is_empty()).count();
        let ids = tokenizer.encode_plain(source);
        let letters = ids.iter().filter(|&&id| tokenizer.decode(&[id]).contains(|c: char| c.is_ascii_alphabetic())).count();
        assert_eq!(letters, words(source), "{source}");
        // An edit that echoes a line is spelled as the listing spells it.
        let listing: Vec<String> = source.lines().enumerate().map(|(index, line)| format!("{}|{line}", index + 1)).collect();
        let shown = tokenizer.encode_plain(&listing.join("\n"));
        for line in &listing {
            let echo = tokenizer.encode_plain(line);
            assert!(shown.windows(echo.len()).any(|window| window == echo), "{line}");
        }
    }
}
