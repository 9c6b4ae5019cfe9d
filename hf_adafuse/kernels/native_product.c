/* The product of a weight and the vectors of a few tokens, summed in float32. The weight is asked for well ahead of where
   it is read, so that reading it and arithmetic overlap: a handful of tokens take hardly longer than one. One of half the
   precision takes half the time to read: its numbers are widened as they come.

   Built once for each instruction set (setup.py), called by native_product.py. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* How the weight and the product hold their numbers; as native_product.py has it. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

/* A tile is four rows of the weight times up to TOKENS vectors: as many sums as there are registers for. */
#ifdef __AVX512F__
enum { LANES = 16, TOKENS = 6 };
typedef __m512 lanes;
#define OF_LANES(name) _mm512_##name
static inline lanes widened(const char *at, int kind) {
  __m256i halves = _mm256_loadu_si256((const __m256i *)at);
  if (kind == FLOAT16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
static inline __m128 folded(lanes v) {
  __m256 low = _mm512_castps512_ps256(v), high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  __m256 half = _mm256_add_ps(low, high);
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#else
enum { LANES = 8, TOKENS = 3 };
typedef __m256 lanes;
#define OF_LANES(name) _mm256_##name
static inline lanes widened(const char *at, int kind) {
  __m128i halves = _mm_loadu_si128((const __m128i *)at);
  if (kind == FLOAT16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
static inline __m128 folded(lanes v) {
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
#endif

enum { TILE_ROWS = 4, BLOCK_ROWS = 16, MAX_TOKENS = 128 };
/* In bytes: about what memory delivers within the time that it takes to answer. */
enum { AHEAD = 8192 };

#define UNROLLED _Pragma("GCC unroll 8")
/* With constants for what kind and how many, so that nothing of a tile is decided within it. */
#define INLINED static inline __attribute__((always_inline))

INLINED size_t width(int kind) { return kind == FLOAT32 ? sizeof(float) : sizeof(uint16_t); }

INLINED lanes loaded(const char *at, int kind) {
  return kind == FLOAT32 ? OF_LANES(loadu_ps)((const float *)at) : widened(at, kind);
}

/* Rounded to the nearest, of two as near to the even one. */
INLINED void store(float value, void *out, size_t index, int kind) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (kind == FLOAT32)
    ((float *)out)[index] = value;
  else if (kind == FLOAT16)
    ((uint16_t *)out)[index] = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
  else
    ((uint16_t *)out)[index] = value != value ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

/* The sum of the lanes of each of four vectors. */
static inline __m128 totals(const lanes *v) {
  lanes ab = OF_LANES(add_ps)(OF_LANES(unpacklo_ps)(v[0], v[1]), OF_LANES(unpackhi_ps)(v[0], v[1]));
  lanes cd = OF_LANES(add_ps)(OF_LANES(unpacklo_ps)(v[2], v[3]), OF_LANES(unpackhi_ps)(v[2], v[3]));
  return folded(OF_LANES(add_ps)(OF_LANES(shuffle_ps)(ab, cd, 0x44), OF_LANES(shuffle_ps)(ab, cd, 0xEE)));
}

/* `out` has BLOCK_ROWS columns. */
INLINED void tile(const char *weight, size_t num_columns, const float *vectors, float *out, int num_tokens, int kind) {
  lanes sums[TOKENS][TILE_ROWS];
  UNROLLED for (int t = 0; t < num_tokens; t++)
    UNROLLED for (int r = 0; r < TILE_ROWS; r++) sums[t][r] = OF_LANES(setzero_ps)();
  for (size_t at = 0; at < num_columns; at += LANES) {
    lanes rows[TILE_ROWS];
    UNROLLED for (int r = 0; r < TILE_ROWS; r++) {
      const char *here = weight + (r * num_columns + at) * width(kind);
      rows[r] = loaded(here, kind);
      /* Ahead may be past the end, which does no harm, but is no place for a pointer. */
      _mm_prefetch((const char *)((uintptr_t)here + AHEAD), _MM_HINT_T0);
    }
    UNROLLED for (int t = 0; t < num_tokens; t++) {
      lanes vector = OF_LANES(loadu_ps)(vectors + t * num_columns + at);
      UNROLLED for (int r = 0; r < TILE_ROWS; r++) sums[t][r] = OF_LANES(fmadd_ps)(rows[r], vector, sums[t][r]);
    }
  }
  UNROLLED for (int t = 0; t < num_tokens; t++) _mm_storeu_ps(out + t * BLOCK_ROWS, totals(sums[t]));
}

/* Four rows times all vectors, in tiles of about the same number of tokens. */
INLINED void tiles(const char *weight, size_t num_columns, const float *vectors, size_t num_tokens, float *out,
                   int kind) {
  size_t num_tiles = (num_tokens + TOKENS - 1) / TOKENS;
  for (size_t i = 0, first = 0; i < num_tiles; i++) {
    size_t next = (i + 1) * num_tokens / num_tiles;
    const float *some = vectors + first * num_columns;
    float *into = out + first * BLOCK_ROWS;
    switch (next - first) {
      case 1: tile(weight, num_columns, some, into, 1, kind); break;
      case 2: tile(weight, num_columns, some, into, 2, kind); break;
      case 3: tile(weight, num_columns, some, into, 3, kind); break;
#ifdef __AVX512F__
      case 4: tile(weight, num_columns, some, into, 4, kind); break;
      case 5: tile(weight, num_columns, some, into, 5, kind); break;
      case 6: tile(weight, num_columns, some, into, 6, kind); break;
#endif
    }
    first = next;
  }
}

/* Sixteen rows of the weight, of which the first `num_shared` are those of another block: of them nothing is kept. */
INLINED void block_of_rows(const char *weight, const float *vectors, const float *bias, void *out, size_t row,
                           size_t num_shared, size_t num_rows, size_t num_columns, size_t num_tokens, int kind) {
  float products[MAX_TOKENS * BLOCK_ROWS];
  for (size_t r = 0; r < BLOCK_ROWS; r += TILE_ROWS)
    tiles(weight + (row + r) * num_columns * width(kind), num_columns, vectors, num_tokens, products + r, kind);
  for (size_t t = 0; t < num_tokens; t++)
    for (size_t r = num_shared; r < BLOCK_ROWS; r++)
      store(products[t * BLOCK_ROWS + r] + (bias ? bias[row + r] : 0), out, t * num_rows + row + r, kind);
}

/* out (num_tokens, num_rows) = vectors (num_tokens, num_columns) x weight (num_rows, num_columns) transposed + bias
   (num_rows), which may be NULL; all are contiguous, vectors and bias in float32. At least 16 rows, a multiple of 16
   columns, at most 128 tokens. */
void native_product_2(const char *weight, const float *vectors, const float *bias, void *out, size_t num_rows,
                      size_t num_columns, size_t num_tokens, int kind, int num_threads) {
  size_t num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (size_t block = 0; block < num_blocks; block++) {
    /* The last block begins earlier where there would be too few rows. */
    size_t first = block * BLOCK_ROWS, row = first + BLOCK_ROWS > num_rows ? num_rows - BLOCK_ROWS : first;
#define OF_KIND(constant) \
  block_of_rows(weight, vectors, bias, out, row, first - row, num_rows, num_columns, num_tokens, constant)
    if (kind == FLOAT32)
      OF_KIND(FLOAT32);
    else if (kind == BFLOAT16)
      OF_KIND(BFLOAT16);
    else
      OF_KIND(FLOAT16);
  }
}
