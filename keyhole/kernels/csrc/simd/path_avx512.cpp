#define KEYHOLE_PATH avx512_path
#define KEYHOLE_VECTOR "vector_avx512.h"
#define KEYHOLE_PROMPT_TILES "prompt_tiles.h"
#include "path.h"
