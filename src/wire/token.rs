//! The secret that the programs of a job share. It never crosses the wire: each side proves that it has it with HMAC-SHA256
//! (RFC 2104) over numbers that the other side has just drawn.

use std::fmt;

use sha2::{Digest, Sha256};

/// The fewest characters of a token: whoever makes a program call a port of theirs gets a proof to try tokens on.
const SHORTEST: usize = 16;
/// Bytes of a block of SHA-256.
const BLOCK: usize = 64;

/// Proof of knowing a token: `HMAC-SHA256(token, message)`.
pub type Proof = [u8; 32];

/// A secret shared by all programs of a job. Its text is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl Token {
    /// The text without white space at its ends; refused when it is short.
    pub fn new(text: &str) -> Result<Token, String> {
        let text = text.trim();
        match text.chars().count() {
            SHORTEST.. => Ok(Token(text.as_bytes().to_vec())),
            length => Err(format!(
                "the token has {length} characters, at least {SHORTEST} are needed: give all the same secret, for example from `openssl rand -hex 32`"
            )),
        }
    }

    pub fn prove(&self, message: &[&[u8]]) -> Proof {
        let mut key = [0; BLOCK];
        if self.0.len() > BLOCK {
            key[..32].copy_from_slice(&Sha256::digest(&self.0));
        } else {
            key[..self.0.len()].copy_from_slice(&self.0);
        }
        let mut inner = Sha256::new_with_prefix(key.map(|byte| byte ^ 0x36));
        message.iter().for_each(|part| inner.update(part));
        Sha256::new_with_prefix(key.map(|byte| byte ^ 0x5c)).chain_update(inner.finalize()).finalize().into()
    }

    /// Takes the same time wherever a wrong proof differs.
    pub fn accepts(&self, proof: &Proof, message: &[&[u8]]) -> bool {
        let expected = self.prove(message);
        let difference = expected.iter().zip(proof).fold(0, |difference, (a, b)| difference | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// RFC 4231, test cases 1, 2, 3, 6 and 7.
    #[test]
    fn proofs_are_hmac_sha256() {
        let long_data: &[u8] = b"This is a test using a larger than block-size key and a larger than block-size data. \
            The key needs to be hashed before being used by the HMAC algorithm.";
        let cases: [(&[u8], &[u8], &str); 5] = [
            (&[0x0b; 20], b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
            (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
            (&[0xaa; 20], &[0xdd; 50], "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
            (
                &[0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
            (&[0xaa; 131], long_data, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"),
        ];
        for (key, data, expected) in cases {
            let (start, end) = data.split_at(data.len() / 3);
            assert_eq!(hex(&Token(key.to_vec()).prove(&[start, end])), expected);
        }
    }

    #[test]
    fn one_wrong_bit_is_refused() {
        let token = Token::new(" a secret of tests\n").expect("a token");
        assert_eq!(token, Token::new("a secret of tests").expect("a token"));
        let proof = token.prove(&[b"message"]);
        assert!(token.accepts(&proof, &[b"mess", b"age"]));
        for bit in 0..256 {
            let mut wrong = proof;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!token.accepts(&wrong, &[b"message"]));
        }
        assert!(!Token::new("A secret of tests").expect("a token").accepts(&proof, &[b"message"]));
        assert!(Token::new(" \n").is_err());
        assert!(Token::new("fifteen letters").is_err_and(|line| line.starts_with("the token has 15 characters, at least 16")));
        assert!(Token::new("sixteen letters.").is_ok());
        assert_eq!(format!("{token:?}"), "Token(secret)");
    }
}
